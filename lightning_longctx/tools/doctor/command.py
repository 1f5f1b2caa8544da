"""``longctx doctor``: the parent plans, starts worlds of 1, 2 and 4 processes, and reports; each rank runs its part.

The processes share nothing but a folder: the first world leaves the reference there as tensors (read back without
running code), and rank 0 of each world its findings as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_longctx.errors import ConfigurationError, FieldError
from lightning_longctx.tools.configuration import ReadConfiguration, RunConfiguration
from lightning_longctx.tools.doctor.cases import Group, draw_groups
from lightning_longctx.tools.doctor.checks import Subject, check_evaluation, check_gradients, check_resume, probe_rows
from lightning_longctx.tools.doctor.compare import Finding
from lightning_longctx.tools.doctor.fits import fresh
from lightning_longctx.tools.doctor.launch import run_world
from lightning_longctx.tools.doctor.options import DoctorOptions, read_options
from lightning_longctx.tools.doctor.reference import Reference, ReferenceStep
from lightning_longctx.tools.doctor.report import REPORT, DoctorReport, model_name
from lightning_longctx.tools.output import make_folders, write_json
from lightning_longctx.units import counted

__all__ = ["main"]

#: Pairs of processes and ranks of a row.
SIZES = ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4))
#: Where a checkpoint is written and read back: data-parallel and sequence-parallel ranks at once.
RESUMED = ((1, 1), (4, 2))


def main(words: Sequence[str], read: ReadConfiguration) -> int:
    """Run the command.

    Args:
        words: what follows ``longctx doctor``.
        read: reads the words that belong to the configuration.

    Returns:
        0, or 1 if a layout gives something else than the reference.

    Raises:
        ConfigurationError: an option or setting that cannot work, or a process that failed.
    """
    options, rest = read_options(words)
    subject = _subject(read(rest), options)
    if options.as_rank is not None:
        _run_rank(subject, options, options.as_rank)
        return 0
    make_folders({"--out": options.folder, "--json": options.json and options.json.parent})
    start = perf_counter()
    groups = _groups(subject, options)
    findings: list[Finding] = []
    with tempfile.TemporaryDirectory(prefix="longctx-doctor-") as name:
        folder = Path(name)
        sizes = sorted({group.world_size for group in groups})
        worlds = ", ".join(map(str, sizes))
        print(f"{counted(len(groups), 'random layout')}, in worlds of {worlds}: a minute or two.", file=sys.stderr)
        for world_size in sizes:
            began = perf_counter()
            run_world(["doctor", *words, "--as-rank", name], world_size, folder, options.timeout)
            findings += [Finding(**found) for found in json.loads(_findings(folder, world_size).read_text())]
            print(f"{counted(world_size, 'process')}: {perf_counter() - began:.0f} s", file=sys.stderr)
    report = DoctorReport(_facts(subject, options), findings, perf_counter() - start)
    print(report.to_text())
    (options.folder / "doctor.md").write_text(f"{report.to_text()}\n", encoding="utf-8")
    for path in (options.folder / REPORT, options.json):
        write_json(path, report.to_plain())
    return 1 if report.faults else 0


def _subject(configuration: RunConfiguration, options: DoctorOptions) -> Subject:
    module: Any = configuration.build("model")
    if not isinstance(module, pl.LightningModule):
        raise ConfigurationError("model", "must be a LightningModule", type(module).__name__, "Name one.")
    if not module.automatic_optimization:
        fix = "Examine a version of the module with automatic optimization: the exchange and the loss are the same."
        raise ConfigurationError("model", "must use automatic optimization", "manual optimization", fix)
    prepare = getattr(module, "for_cpu_check", None)
    if callable(prepare):
        module = prepare(full=options.full)
    strategy = configuration.build("strategy")
    return Subject(module, strategy, _vocabulary(module), options.tolerance, options.row_tokens)


def _vocabulary(module: pl.LightningModule) -> int:
    size = getattr(module, "vocab_size", None)
    if size is None:
        tables = [child.num_embeddings for child in fresh(module).modules() if isinstance(child, nn.Embedding)]
        size = min(tables, default=None)
    if size is None:
        fix = "Give the module a `vocab_size`."
        raise ConfigurationError("model.vocab_size", "must be known to make rows", "no embedding", fix)
    return int(size)


def _groups(subject: Subject, options: DoctorOptions) -> list[Group]:
    """The layouts, without those that the number of heads forbids."""
    sizes = [(world, sp) for world, sp in SIZES if world <= options.processes and _heads_allow(subject.module, sp)]
    return draw_groups(sizes, options.layouts, options.seed, options.row_tokens)


def _heads_allow(module: pl.LightningModule, sp_size: int) -> bool:
    heads = getattr(getattr(module, "config", None), "num_attention_heads", sp_size)
    return not isinstance(heads, int) or heads % sp_size == 0


def _facts(subject: Subject, options: DoctorOptions) -> dict[str, Any]:
    module = fresh(subject.module)
    has_twin = callable(getattr(module, "plain_twin", None))
    own = "the module's own step on one document at a time, in one process"
    shrinks = callable(getattr(module, "for_cpu_check", None)) and not options.full
    return {
        "model": model_name(module),
        "size": "small" if shrinks else "whole",
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "reference": "transformers with eager attention, one document at a time" if has_twin else own,
        "seed": options.seed,
        "tolerance": options.tolerance,
    }


# -- in the processes ------------------------------------------------------------------------------------------------


def _run_rank(subject: Subject, options: DoctorOptions, folder: Path) -> None:
    warnings.simplefilter("ignore")  # of Lightning's advice, dozens of times
    torch.set_num_threads(1)
    world_size = int(os.environ["WORLD_SIZE"])
    groups = _groups(subject, options)
    if world_size == 1:
        _save_reference(subject, groups, folder)
    known = torch.load(folder / "reference.pt", weights_only=True)
    findings: list[Finding] = []
    for number, group in enumerate(groups):
        if group.world_size != world_size:
            continue
        expected = [ReferenceStep(*values) for values in known["steps"][number]]
        try:
            for found in _examine(subject, group, expected, known["tokens"], folder):
                findings += found
        except FieldError as refusal:  # on all ranks alike; what training refuses too is a finding, not an accident
            sizes = (world_size, group.sp_size, group.accumulate, 0)
            findings.append(Finding("refused", *sizes, None, "", "fault", str(refusal)))
            break  # what a step left half done must not meet another fit
    if int(os.environ["RANK"]) == 0:
        _findings(folder, world_size).write_text(json.dumps([asdict(finding) for finding in findings]))


def _examine(
    subject: Subject, group: Group, expected: Sequence[ReferenceStep], tokens: torch.Tensor, folder: Path
) -> Iterator[list[Finding]]:
    """Make the checks of a group one after another."""
    yield check_gradients(subject, group, expected)
    has_experts = expected[0].margin != float("inf")
    yield check_evaluation(subject, group.world_size, group.sp_size, tokens, has_experts)
    plans = [plan for step in group.steps for plan in step][: 2 * group.dp_size]
    if (group.world_size, group.sp_size) in RESUMED and len(plans) == 2 * group.dp_size:
        yield [check_resume(subject, group.world_size, group.sp_size, plans, folder)]


def _save_reference(subject: Subject, groups: Sequence[Group], folder: Path) -> None:
    reference = Reference(subject.module)
    steps = [reference.steps([subject.rows(step) for step in group.steps]) for group in groups]
    (tokens,) = reference.token_losses(subject.rows([probe_rows(subject.row_tokens)[0]]))
    plain = [[tuple(step) for step in map(_as_tuple, of_group)] for of_group in steps]
    torch.save({"steps": plain, "tokens": tokens}, folder / "reference.pt")


def _as_tuple(step: ReferenceStep) -> tuple[float, dict[str, torch.Tensor], float]:
    return step.loss, step.gradients, step.margin


def _findings(folder: Path, world_size: int) -> Path:
    return folder / f"world{world_size}.json"
