"""``longctx checkpoint list|verify|export|prune``: look after a folder of checkpoints, without the run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_longctx.checkpoint.address import Folder, as_folder
from lightning_longctx.checkpoint.discovery import Found, as_checkpoint, find_latest, is_checkpoint, scan, verify
from lightning_longctx.checkpoint.export import export_checkpoint
from lightning_longctx.checkpoint.layout import parse_name
from lightning_longctx.checkpoint.object_store import filesystem_of
from lightning_longctx.checkpoint.retention import Retention, prune, superfluous
from lightning_longctx.checkpoint.scores import read_scores
from lightning_longctx.errors import CheckpointError
from lightning_longctx.tools.configuration import ReadConfiguration
from lightning_longctx.tools.flags import RaisingParser, integer
from lightning_longctx.tools.output import human_bytes, make_folders, write_json

__all__ = ["main"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(words: Sequence[str], read: ReadConfiguration) -> int:
    """Run the command.

    Args:
        words: what follows ``longctx checkpoint``.
        read: not needed: a checkpoint says itself what it is.

    Returns:
        0, or 1 if ``verify`` found damage.

    Raises:
        ConfigurationError: wrong words.
        CheckpointError: no such folder, or a checkpoint that cannot be used as asked.
    """
    options = _parser().parse_args(list(words))
    options.path = as_folder(options.path, "DIR")
    run: Callable[[argparse.Namespace], tuple[int, Any]] = options.run
    make_folders({"--json": options.json and options.json.parent})
    code, result = run(options)
    write_json(options.json, result)
    return code


def _parser() -> RaisingParser:
    parser = RaisingParser(
        prog="longctx checkpoint", description="Look after a folder of checkpoints.", allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="list|verify|export|prune", parser_class=RaisingParser)

    def add(name: str, run: Callable[[argparse.Namespace], tuple[int, Any]], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.add_argument("path", metavar="DIR", help="the folder, or one checkpoint of it; a path or an address")
        command.add_argument("--json", type=Path, help="also write the result to this file")
        command.set_defaults(run=run)
        return command

    add("list", _list, "step, content, size and state of each checkpoint, the newest first")
    one = add("verify", _verify, "check sizes and the checksums of everything but tensors; exit with 1 on damage")
    one.add_argument("--deep", action="store_true", help="the checksums of tensors as well")
    one = add("export", _export, "write the weights in another form; of a folder those of the newest")
    one.add_argument("--to", choices=("hf", "torch", "lightning"), default="hf", help="form (%(default)s)")
    one.add_argument("--output", required=True, help="directory (hf) or file; must not exist")
    one.add_argument("--dtype", choices=sorted(_DTYPES), help="of floating-point weights (as saved)")
    one.add_argument("--tokenizer", help="directory of the tokenizer (the one that was trained with)")
    one = add("prune", _prune, "remove what is not kept, run by run; never the last one")
    one.add_argument("--keep-last", type=integer(1), default=2, help="newest checkpoints of each run (%(default)s)")
    one.add_argument("--keep-every-n-steps", type=integer(0), default=0, help="and multiples of this (none)")
    one.add_argument("--save-top-k", type=integer(0), default=1, help="and the best by their score (%(default)s)")
    one.add_argument("--mode", choices=("min", "max"), default="min", help="whether low or high is best")
    one.add_argument("--dry-run", action="store_true", help="only say what would go")
    return parser


def _list(options: argparse.Namespace) -> tuple[int, Any]:
    found = _found(options.path)
    scores = read_scores(options.path)
    rows = [_row(one, scores) for one in found]
    print(f"{'step':>8}  {'content':<18} {'size':>9}  {'ranks':>5}  {'run':<8}  {'score':>8}  checkpoint")
    for row in rows:
        score = "" if row["score"] is None else f"{row['score']:.4g}"
        print(
            f"{row['step'] if row['step'] is not None else '?':>8}  {row['content']:<18} {human_bytes(row['bytes']):>9}"
            f"  {row['ranks'] or '':>5}  {row['run'] or '':<8}  {score:>8}  {row['name']}  {row['problem']}".rstrip()
        )
    return 0, rows


def _verify(options: argparse.Namespace) -> tuple[int, Any]:
    problems = {one.path.name: verify(one.path, None if options.deep else 0) for one in _found(options.path)}
    for name, problem in problems.items():
        print(f"{name}: {problem or 'intact'}")
    return int(any(problems.values())), problems


def _export(options: argparse.Namespace) -> tuple[int, Any]:
    path = options.path
    if not is_checkpoint(path):
        newest = find_latest(path, resumable=options.to == "lightning")
        if newest is None:
            raise _nothing(path)
        path = newest.path
    dtype = _DTYPES[options.dtype] if options.dtype else None
    output = export_checkpoint(path, options.output, options.to, dtype, tokenizer=options.tokenizer)
    print(f"{path.name} -> {output}")
    return 0, {"checkpoint": str(path), "output": str(output)}


def _prune(options: argparse.Namespace) -> tuple[int, Any]:
    rules = Retention(options.keep_last, options.keep_every_n_steps, options.save_top_k, options.mode)
    scores = read_scores(options.path)
    found = _found(options.path)
    if options.dry_run:
        commits = [one.commit for one in found if one.commit is not None and not one.problem]
        runs = {commit.run for commit in commits}
        names = [
            commit.name
            for run in sorted(runs)
            for commit in superfluous([one for one in commits if one.run == run], rules, scores)
        ]
    else:
        names = prune(filesystem_of(options.path), options.path, rules, scores)
    for name in names:
        print(f"{'would remove' if options.dry_run else 'removed'} {name}")
    return 0, names


def _found(path: Folder) -> list[Found]:
    one = as_checkpoint(path)
    if parse_name(one.name) and (one.is_dir() if isinstance(one, Path) else is_checkpoint(one)):
        return [found for found in scan(one.parent) if found.path.name == one.name]
    found = scan(path)
    if not found:
        raise _nothing(path)
    return found


def _nothing(path: Folder) -> CheckpointError:
    got = "no such folder" if isinstance(path, Path) and not path.is_dir() else "no checkpoint"
    return CheckpointError(str(path), "must hold checkpoints", got, "Give the `dirpath` of the run.")


def _row(found: Found, scores: dict[str, float]) -> dict[str, Any]:
    commit = found.commit
    content = "damaged" if commit is None else " + ".join(commit.slots) or "progress only"
    if commit is not None and not commit.resumable:
        content += " only"
    return {
        "name": found.path.name,
        "path": str(found.path),
        "step": None if commit is None else commit.step,
        "content": content,
        "resumable": commit is not None and commit.resumable and not found.problem,
        "bytes": None if commit is None else commit.size,
        "ranks": None if commit is None else len(commit.ranks),
        "run": None if commit is None else commit.run,
        "score": scores.get(found.path.name),
        "problem": found.problem,
    }
