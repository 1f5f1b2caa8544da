"""``LongContextCLI``: LightningCLI in the shape that this package's users write.

Stock LightningCLI has either one fixed model class with flat keys or any class under ``class_path``; here both work. It
also differs in what it does with a wrong key (one line with the nearest right one), a strategy given by its class name,
numbers of tokens, and a second run into the same folder.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from jsonargparse import ArgumentError
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import Strategy, StrategyRegistry

from lightning_longctx.callbacks import AsyncDCPCheckpoint, TrainingMetrics
from lightning_longctx.cli.arguments import Arguments, read_arguments
from lightning_longctx.cli.errors import CommandLineError
from lightning_longctx.cli.explain import explain
from lightning_longctx.cli.notes import ClosingNotes
from lightning_longctx.cli.refusal import hidden_refusal
from lightning_longctx.cli.saving import KeepingSaveConfig
from lightning_longctx.cli.schema import Place, class_names, spell_flag
from lightning_longctx.errors import CheckpointError, ConfigurationError, FieldError
from lightning_longctx.spelling import nearest
from lightning_longctx.tools.before_start import check_checkpoint_path, check_folders, check_sizes
from lightning_longctx.tools.versions import installed_versions

__all__ = ["LongContextCLI", "Trainer"]

#: Whose settings may stand directly under ``model:`` and ``data:``.
DEFAULT_CLASSES = {
    "model": "lightning_longctx.integrations.CausalLMModule",
    "data": "lightning_longctx.datamodules.DynamicBatchingDataModule",
}

#: Runs are logged to files in ``runs/version_N``: the one logger that needs no further package and no account.
DEFAULT_LOGGER = {
    "class_path": "lightning.pytorch.loggers.CSVLogger",
    "init_args": {"save_dir": ".", "name": "runs"},
}

#: A fixed seed, so that a run can be repeated from its configuration alone. The value means nothing.
DEFAULT_SEED = 42

# How long children may take to end by themselves (and print their own error) once the main process failed, in seconds.
_CHILD_GRACE = 1.0

# jsonargparse finds a bare class name among the classes that are imported.
for _package in ("callbacks", "datamodules", "strategies"):
    importlib.import_module(f"lightning_longctx.{_package}")


class Trainer(LightningTrainer):
    """Lightning's Trainer, with a class taken before a name for ``strategy``.

    Stock order is name first, which takes the bare name of a strategy class as the name of a registered strategy and
    refuses it.

    Args:
        strategy: a strategy, its class name or import path, or a registered name such as ``ddp`` or ``longctx_fsdp``.
        kwargs: all other arguments of Lightning's Trainer, unchanged.
    """

    def __init__(self, *, strategy: Strategy | str = "auto", **kwargs: Any) -> None:
        super().__init__(strategy=strategy, **kwargs)


class _ExactParser(LightningArgumentParser):
    """Takes no abbreviated keys: one works until another setting starts like it, and hides a wrong key till then.

    A class, because jsonargparse makes the parsers of nested settings from the class of the outer one.
    """

    def __init__(self, *args: Any, allow_abbrev: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=allow_abbrev, **kwargs)


class LongContextCLI(LightningCLI):
    """LightningCLI for this package's classes and anybody else's.

    ``model:`` and ``data:`` take the settings of ``CausalLMModule`` and ``DynamicBatchingDataModule`` directly, or any
    class as ``class_path`` with ``init_args``. Runs are logged to ``runs/`` as CSV unless ``trainer.logger`` says
    otherwise, and ``TrainingMetrics`` is added unless ``trainer.callbacks`` lists it.

    Args:
        args: the words of the command line, or a whole configuration as a mapping; None means ``sys.argv[1:]``.
        run: whether to run the subcommand's Trainer method; False takes a configuration without a subcommand and stops
            after building ``trainer``, ``model`` and ``datamodule``.

    Raises:
        ConfigurationError: a setting that cannot work, before any process is started.
        CommandLineError: arguments that cannot be understood.

    Example:
        >>> cli = LongContextCLI(["--config", "examples/quickstart.yaml"], run=False)  # doctest: +SKIP
        >>> cli.trainer.fit(cli.model, cli.datamodule)  # doctest: +SKIP
    """

    def __init__(self, args: list[str] | None = None, run: bool = True, **settings: Any) -> None:
        words = sys.argv[1:] if args is None else list(args)
        self._runs = run
        self._command = words[0] if run and words else "fit"
        self._arguments = read_arguments(words)
        self._own = _own_classes(self._arguments)
        defaults: dict[str, Any] = {
            "save_config_callback": partial(KeepingSaveConfig, given=self._arguments.files),
            "save_config_kwargs": {"overwrite": True},
            "trainer_class": Trainer,
            "parser_class": _ExactParser,
            "trainer_defaults": {"logger": DEFAULT_LOGGER},
            "seed_everything_default": DEFAULT_SEED,
        }
        super().__init__(args=words, run=run, **{**defaults, **settings})

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Make a parser that raises where argparse would print its usage; it saves versions with a configuration."""
        header = [f"{name}=={version}" for name, version in installed_versions().items()]
        return super().init_parser(**{"exit_on_error": False, "dump_header": header, **kwargs})

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Return the subcommand that runs alone, where stock builds the parsers of all four at each start."""
        known = super().subcommands()
        return {self._command: known[self._command]} if self._command in known else known

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Let ``model`` and ``data`` take the settings of this package's classes without a ``class_path``."""
        for section in self._own:
            parser.set_defaults({section: {"class_path": DEFAULT_CLASSES[section]}})

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the words into ``self.config``, with dashes in keys read as underscores.

        Raises:
            ConfigurationError: a key or class name that does not exist, with the nearest one that does.
            CommandLineError: any other refusal, in one line.
        """
        places = self._places()
        words = [spell_flag(word, self._arguments.tree, places) for word in args]
        for section, path in DEFAULT_CLASSES.items():  # stock answers this for the base class, which has no settings
            if section in self._own and words[-1:] == [f"--{section}.help"]:
                words[-1] += f"={path}"
        try:
            self.config = parser.parse_args(words)
        except ArgumentError as error:
            actions = self._parser(self._command if self._runs else None)._actions
            others = {action.dest.partition(".")[0]: Place() for action in actions}
            raise explain(str(error), self._arguments.tree, {**others, **places}, self._command) from None

    def _parse_ckpt_path(self) -> None:
        """Take the hyperparameters of a checkpoint that is a file, as stock does.

        Raises:
            CheckpointError: no checkpoint, one that was cut short, or one that would have to run code.
        """
        try:
            super()._parse_ckpt_path()
        except (OSError, CommandLineError, FieldError):
            raise
        except Exception as error:  # torch's reader fails of a foreign file in many ways
            got = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            fix = "Give the path of a whole one, or the word `last`."
            path = str(self.config[self.config.subcommand].ckpt_path)
            raise CheckpointError(path, "must be a checkpoint that can be read", got, fix) from error

    def instantiate_classes(self) -> None:
        """Build trainer, model and data module, and check their sizes before any process is started."""
        check_checkpoint_path(self._get(self.config, "ckpt_path"))
        with self._told_in_one_line():
            super().instantiate_classes()
        trainer = self.trainer
        if self._runs:
            check_folders(_folders(trainer))
            check_checkpoint_path(self._get(self.config, "ckpt_path"), _saves(trainer))
        check_sizes(trainer.strategy, self.datamodule, self.model, trainer.num_devices, trainer.num_nodes)

    def instantiate_trainer(self, **kwargs: Any) -> LightningTrainer:
        """Build the Trainer, with :class:`TrainingMetrics` unless it is listed.

        Args:
            kwargs: arguments that replace the configured ones.

        Raises:
            ConfigurationError: a strategy name that is neither registered nor a class.
        """
        config = {**self._get(self.config_init, "trainer", default={}), **kwargs}
        _check_strategy_name(config.get("strategy"))
        callbacks = config.get("callbacks") or []
        callbacks = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
        if not any(isinstance(callback, TrainingMetrics) for callback in callbacks):
            callbacks.append(TrainingMetrics())
        callbacks.append(ClosingNotes())
        try:
            return super().instantiate_trainer(**{**kwargs, "callbacks": callbacks})
        except FieldError:
            raise
        except (ValueError, TypeError) as error:  # Lightning's, of an accelerator, device or precision
            raise CommandLineError(str(error)) from error

    @contextmanager
    def _told_in_one_line(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, TypeError, ImportError, MisconfigurationException) as error:
            origin = _original(error)
            if isinstance(origin, (MisconfigurationException, ModuleNotFoundError)):  # no such device or package
                raise CommandLineError(str(origin)) from error
            if not isinstance(origin, FieldError) and (
                refusal := hidden_refusal(self._get(self.config.as_dict(), "data"))
            ):
                raise refusal from error
            raise origin from None

    def _add_configure_optimizers_method_to_model(self, subcommand: str | None) -> None:
        """Give the model the optimizer that stands beside it, as stock does, if it has parameters for it by now."""
        section = self._parser(subcommand)._optimizers
        given = any(self._get(self.config, key) is not None for key in section)
        if given and next(self.model.parameters(), None) is None:
            own = " Its own one is set under `model.optimizer`, its schedule under `model.schedule`."
            fix = f"Leave it out.{own if 'model' in self._own else ''}"
            got = f"{type(self.model).__name__}, which makes them later"
            raise ConfigurationError("optimizer", "needs a model that is built with its parameters", got, fix)
        super()._add_configure_optimizers_method_to_model(subcommand)

    def _run_subcommand(self, subcommand: str) -> None:
        try:
            super()._run_subcommand(subcommand)
        except BaseException:
            _end_children(self.trainer)
            raise

    def _places(self) -> dict[str, Place]:
        return {
            "trainer": Place(default=Trainer),
            "model": Place(LightningModule, self._own.get("model")),
            "data": Place(LightningDataModule, self._own.get("data")),
        }


def _own_classes(arguments: Arguments) -> dict[str, type]:
    """Return the sections that take the settings of this package's classes directly, with the class of each."""
    tree = arguments.tree
    own = {
        section: path
        for section, path in DEFAULT_CLASSES.items()
        if section in arguments.direct or section not in tree or _class_name(tree[section]) == path.rpartition(".")[2]
    }
    if "model" not in own and "data" not in tree:
        own.pop("data", None)  # somebody's own model may bring its own loaders
    try:
        return {section: _import_class(path) for section, path in own.items()}
    except ImportError as error:
        if "model" in tree:
            raise ConfigurationError(
                "model",
                "needs the package transformers, unless it names a class of your own",
                f"settings of CausalLMModule ({error})",
                "Run `pip install 'lightning-longctx[hf]'`, or write `model: {class_path: my_package.MyModel}`.",
            ) from error
    own.pop("model")
    return {section: _import_class(path) for section, path in own.items()}


def _class_name(value: object) -> object:
    return value.get("class_path") if isinstance(value, dict) else value


def _import_class(path: str) -> type:
    module, _, name = path.rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    assert isinstance(cls, type)
    return cls


def _check_strategy_name(name: object) -> None:
    registered = ["auto", *StrategyRegistry.available_strategies()]
    if not isinstance(name, str) or name.lower() in registered:
        return
    near = nearest(name, [*class_names(Place(Strategy)), *registered])
    fix = f"Did you mean `{near}`?" if near else f"Registered names: {', '.join(registered)}."
    raise ConfigurationError("trainer.strategy", "must be a strategy class or a registered name", repr(name), fix)


def _folders(trainer: LightningTrainer) -> list[tuple[str, Any]]:
    """Where the loggers (some in a folder of their own inside that which they are given) and checkpoints write."""
    logs = [("trainer.logger", getattr(logger, "root_dir", logger.save_dir)) for logger in trainer.loggers]
    saves = [
        (f"callbacks.{type(one).__name__}.dirpath", getattr(one, "dirpath", None))
        for one in trainer.checkpoint_callbacks
    ]
    return [*(logs or [("trainer.default_root_dir", trainer.default_root_dir)]), *saves]


def _saves(trainer: LightningTrainer) -> str | None:
    """The folder of the callback that is asked for ``best``, if it is ours."""
    first = trainer.checkpoint_callback
    return str(first.dirpath or "checkpoints") if isinstance(first, AsyncDCPCheckpoint) else None


def _original(error: Exception) -> Exception:
    """Return what a constructor raised: jsonargparse wraps it in the list of all arms of the type that it tried."""
    while isinstance(error.__cause__, Exception) and error.__traceback__ is not None:
        frame = error.__traceback__
        while frame.tb_next is not None:
            frame = frame.tb_next
        if not frame.tb_frame.f_globals.get("__name__", "").startswith("jsonargparse"):
            break
        error = error.__cause__
    return error


def _end_children(trainer: LightningTrainer) -> None:
    """End the processes that Lightning started: they may wait for this one in a collective for hours.

    Lightning ends them only on Ctrl+C. They get a moment to end by themselves, since one of them may be about to print
    the error that this process fails of.
    """
    processes = getattr(trainer.strategy.launcher, "procs", None) or []
    children = [child for child in processes if hasattr(child, "poll")]
    if children:
        # Lightning's watching thread reads this list every 5 s and kills this process over a child that died: it would
        # take its exit code, and the error that it has yet to print.
        processes.clear()
    deadline = time.monotonic() + _CHILD_GRACE
    while time.monotonic() < deadline and any(child.poll() is None for child in children):
        time.sleep(0.05)
    for child in children:
        if child.poll() is None:
            child.kill()
        child.wait()
