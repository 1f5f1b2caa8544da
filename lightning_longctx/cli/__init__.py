"""The command line: ``longctx fit|validate|test|predict --config run.yaml``.

This module answers help, version and mistakes that need no configuration to be parsed (a missing file, broken YAML) by
itself. Everything else is in :mod:`lightning_longctx.cli.app`.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

from lightning_longctx.cli.arguments import read_arguments
from lightning_longctx.cli.errors import CommandLineError
from lightning_longctx.cli.tools import TOOLS, run_tool
from lightning_longctx.errors import FieldError
from lightning_longctx.spelling import nearest

if TYPE_CHECKING:
    from lightning_longctx.cli.app import LongContextCLI
    from lightning_longctx.cli.parts import build_from_config, load_config

__all__ = ["LongContextCLI", "build_from_config", "load_config", "main"]

#: What ``longctx --help`` lists. The first four run a Trainer method of the same name.
COMMANDS = {
    "fit": "train a model",
    "validate": "compute the validation loss",
    "test": "compute the test loss",
    "predict": "run the model on data, for a callback that keeps its outputs",
}

# What other programs call a command.
_OTHER_WORDS = {"train": "fit", "eval": "validate", "evaluate": "validate"}

#: The exit code of a mistake in the configuration, as argparse has it.
CONFIGURATION_EXIT_CODE = 2

#: That of a command that was stopped by Ctrl-C, as shells have it.
INTERRUPTED_EXIT_CODE = 130

# What a disk answers that takes no more: no fault of the code, so one line says it better than a traceback.
_NOT_WRITABLE = (errno.ENOSPC, errno.EROFS, errno.EDQUOT)

# How long a rank other than 0 keeps its error for itself, in seconds. An error that all ranks agreed on is printed
# once, because rank 0 ends its children before they speak; an error of one rank alone is printed after this time.
_OTHER_RANK_DELAY = 5.0

_LAZY = {
    "LongContextCLI": "lightning_longctx.cli.app",
    "build_from_config": "lightning_longctx.cli.parts",
    "load_config": "lightning_longctx.cli.parts",
}


if not TYPE_CHECKING:  # else any name that is misspelt would be one of type `Any`

    def __getattr__(name: str) -> Any:
        if name in _LAZY:
            return getattr(importlib.import_module(_LAZY[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: what follows the program's name; None means ``sys.argv[1:]``. With several processes started by
            Lightning (``devices: 2`` without torchrun) the children repeat ``sys.argv``, so give None there.

    Returns:
        The exit code: 0 when all went well, 1 when a tool found something, 2 for a mistake in the configuration or the
        data, or a disk that takes no more, told in one line; 130 after Ctrl-C before or after training.

    Example:
        >>> main(["--version"])  # doctest: +ELLIPSIS
        longctx ...
        0
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if words else CONFIGURATION_EXIT_CODE
    if words[0] == "--version":
        print(f"longctx {_version()}")
        return 0
    # A script's own folder is on the path and a console script's is not, yet `class_path: my_model.MyModel` is expected
    # to work in both. Last, so that a folder named `datasets` does not hide a package.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        code = _run(words)
        sys.stdout.flush()  # here, where a disk that is full can be told
        return code
    except (FieldError, CommandLineError) as error:
        _report(error)
    except KeyboardInterrupt:  # outside of training, which Lightning ends by itself
        if not _local_rank():
            print("\nlongctx: stopped by Ctrl-C.", file=sys.stderr)
        return INTERRUPTED_EXIT_CODE
    except OSError as error:
        if error.errno not in _NOT_WRITABLE:
            raise
        place = f"`{error.filename}`" if error.filename else "a file"
        fix = "Free some space or give another folder; checkpoints that are complete stay."
        _report(CommandLineError(f"{place} could not be written: {error.strerror}. {fix}"))
    return CONFIGURATION_EXIT_CODE


def _run(words: list[str]) -> int:
    if words[0] in TOOLS:
        return run_tool(words[0], words[1:])
    if words[0] not in COMMANDS:
        known = [*COMMANDS, *TOOLS]
        near = _OTHER_WORDS.get(words[0]) or nearest(words[0], known)
        fix = f"Did you mean `{near}`?" if near else f"Commands: {', '.join(known)}."
        fix = f"The command comes first: `longctx fit {words[0]} ...`. {fix}" if words[0].startswith("-") else fix
        raise CommandLineError(f"unknown command {words[0]!r}. {fix}")
    rest = [word for word in words[1:] if word.replace("-", "_") != "__print_layout"]
    parsed = read_arguments(rest)  # a missing file is told first
    if len(rest) < len(words) - 1:
        from lightning_longctx.cli.layout import print_layout

        print_layout(parsed.words)
        return 0
    from lightning_longctx.cli.app import LongContextCLI

    LongContextCLI(args=[words[0], *parsed.words])
    return 0


def _report(error: Exception) -> None:
    text = f"longctx: error: {' '.join(str(error).split())}\n"
    during_run = "torch.distributed" in sys.modules and sys.modules["torch.distributed"].is_initialized()
    rank = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))) if during_run else _local_rank()
    if rank and not during_run:
        return  # every process reads the same configuration: one voice for each machine is enough
    if rank:
        time.sleep(_OTHER_RANK_DELAY)
        text = f"[rank {rank}] {text}"
    sys.stderr.write(text)
    sys.stderr.flush()


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))


def _version() -> str:
    try:
        return metadata.version("lightning-longctx")
    except metadata.PackageNotFoundError:
        return "(a source tree that is not installed)"


def _help() -> str:
    commands = COMMANDS | {name: text for name, (text, _) in TOOLS.items()}
    width = max(map(len, commands)) + 2
    lines = [f"  {name:{width}}{text}" for name, text in commands.items()]
    return "\n".join(
        [
            "usage: longctx COMMAND --config FILE [--config FILE ...] [--SECTION.KEY VALUE ...]",
            "",
            "Train language models on long sequences with PyTorch Lightning.",
            "",
            "commands:",
            *lines,
            "",
            "Sections are trainer, model and data. Examples:",
            "  longctx init quickstart > quickstart.yaml      a recipe to start from; without a name, the list",
            "  longctx check --config quickstart.yaml         all of a start but the training",
            "  longctx fit --config quickstart.yaml",
            "  longctx fit --config run.yaml --trainer.max_steps 100 --data.max_seq_len 512K",
            "  longctx fit --config run.yaml --print_config   every setting with its value",
            "  longctx fit --config run.yaml --print_layout   which rank does what, without starting any",
            "  longctx fit --help                             every setting of the Trainer",
            "  longctx fit --model.help                       every setting of the model; --data.help of the data",
            "  longctx probe --config run.yaml --dp 8         how the documents pack, on 8 ranks",
            "  longctx doctor --config run.yaml               the model in every layout, against a plain reference",
            "  longctx plan --config run.yaml --device-gb 80  whether it fits a device, and what to switch on",
            "  longctx report runs/version_0                  one HTML page of a run",
            "  longctx --version",
        ]
    )
