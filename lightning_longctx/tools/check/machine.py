"""Checks of the machine: versions, devices, memory, disk, port."""

from __future__ import annotations

import copy
import os
import platform
import shutil
import socket
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement

from lightning_longctx.callbacks.checkpoint_capture import weights_of
from lightning_longctx.checkpoint.discovery import as_checkpoint, scan
from lightning_longctx.checkpoint.states import expected_optimizer_tensors
from lightning_longctx.errors import ConfigurationError
from lightning_longctx.strategies.memory import MemorySettings
from lightning_longctx.strategies.precision import FSDP2Precision
from lightning_longctx.tools.check.length import length_of
from lightning_longctx.tools.check.report import Check, Skipped
from lightning_longctx.tools.check.run import checkpoint_folder
from lightning_longctx.tools.check.subject import Subject
from lightning_longctx.tools.output import human_bytes
from lightning_longctx.tools.plan.options import PlanOptions
from lightning_longctx.tools.plan.reading import read_run
from lightning_longctx.tools.plan.search import Planner, with_margin
from lightning_longctx.tools.plan.shell import optimizers_of
from lightning_longctx.tools.plan.stub import attach_trainer
from lightning_longctx.units import GIB, counted

__all__ = ["check_devices", "check_disk", "check_memory", "check_port", "check_versions"]

_PACKAGE = "lightning-longctx"
_SHOWN = ("torch", "lightning", "transformers")


def check_versions(subject: Subject) -> Check:
    """Whether each installed package is as new as this one needs."""
    try:
        needed = [Requirement(line) for line in metadata.requires(_PACKAGE) or []]
    except metadata.PackageNotFoundError:
        raise Skipped("a source tree that is not installed") from None
    found: dict[str, str] = {}
    for requirement in needed:
        version = _installed(requirement.name)
        core = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        optional = (
            version is not None and requirement.marker is not None and requirement.marker.evaluate({"extra": "hf"})
        )
        if not (core or optional):
            continue
        found[requirement.name] = version or "none"
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            fix = f"Run `pip install '{requirement.name}{requirement.specifier}'`."
            raise ConfigurationError(requirement.name, f"must be {requirement.specifier}", version or "none", fix)
    shown = [f"{name} {found[name]}" for name in _SHOWN if name in found]
    text = ", ".join([f"{_PACKAGE} {metadata.version(_PACKAGE)}", f"Python {platform.python_version()}", *shown])
    return Check("versions", "fine", text, {"versions": found})


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_devices(subject: Subject) -> Check:
    """Whether this machine has what one node of the run needs."""
    asked, have = subject.devices, subject.accelerators
    if subject.options.device_gb is not None:
        raise Skipped("--device-gb is given: training runs on another machine")
    if not subject.wants_accelerator:
        cores = os.cpu_count() or 1
        return Check(
            "devices",
            "fine",
            f"{counted(asked or 1, 'process')} on {counted(cores, 'core')}, no accelerator",
            {"cores": cores},
        )
    if asked is None or asked > have or have == 0:
        fix = "Check where training runs, or give --device-gb (and --devices) of that machine."
        rule = f"asks for {counted(asked, 'accelerator') if asked else 'all accelerators'}"
        raise ConfigurationError("trainer.devices", rule, f"{have} on this machine", fix)
    return Check("devices", "fine", f"{asked} of {counted(have, 'accelerator')}", {"accelerators": have})


def check_memory(subject: Subject) -> Check:
    """Whether a step fits a device, as ``longctx plan`` simulates it."""
    device = subject.options.device_gb or _device_gib(subject)
    subject.shaped_model()
    try:
        run = read_run(subject.configuration, PlanOptions(device, devices=subject.devices))
        peaks = Planner(run, int(device * GIB)).peaks(run.settings)
    except (ConfigurationError, RuntimeError, AttributeError) as error:
        # What hinders training was told by other checks; a module may ask more of its Trainer than is here.
        raise Skipped(f"not simulated: {' '.join(str(error).split())}") from error
    needed = with_margin(peaks.peak) / GIB
    facts = {"needed_gib": needed, "device_gib": device, "set_by": peaks.binding}
    text = f"{needed:.1f} GiB with margin of {device:g} GiB, set by the {peaks.binding}"
    if needed > device:
        text += f"; `longctx plan --device-gb {device:g}` says what to switch on"
        return Check("memory", "finding", text, facts)
    return Check("memory", "fine", text, facts)


def _device_gib(subject: Subject) -> float:
    if not subject.wants_accelerator:
        raise Skipped("training runs on the CPU; give --device-gb for a GPU")
    if not subject.accelerators:
        raise Skipped("no accelerator here: give --device-gb of the one that is meant")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    memory_of = getattr(torch.get_device_module(accelerator), "mem_get_info", None)
    if memory_of is None:
        raise Skipped("this accelerator does not tell its memory: give --device-gb")
    return float(memory_of()[1] / GIB)


def check_disk(subject: Subject) -> Check:
    """Whether as many checkpoints as are kept, and the one being written, fit beside what is on the disk."""
    settings, folder = subject.callback("AsyncDCPCheckpoint"), checkpoint_folder(subject)
    if settings is None or folder is None:
        raise Skipped("no AsyncDCPCheckpoint in `trainer.callbacks`")
    if not isinstance(folder, Path):
        raise Skipped(f"{folder} is no disk: a store does not tell what is free")
    weights, optimizer = _saved_bytes(subject, bool((settings.get("options") or {}).get("trainable_only")))
    whole, parts = _kept(settings, length_of(subject).steps)
    needed = whole * (weights + optimizer) + parts * weights
    there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(there).free
    kept = _bytes_there(subject, folder)
    facts = {"checkpoint_bytes": weights + optimizer, "needed_bytes": needed, "free_bytes": free, "there_bytes": kept}
    also = f" and {parts} of weights alone" if parts else ""
    text = (
        f"{counted(whole, 'checkpoint')} of {human_bytes(weights + optimizer)}{also} need {human_bytes(needed)};"
        f" {human_bytes(free)} free for {folder}{f', which holds {human_bytes(kept)} of them' if kept else ''}"
    )
    lacks = needed > free + kept or weights + optimizer > free  # the next is written before the oldest goes
    return Check("disk", "finding" if lacks else "fine", text, facts)


def _bytes_there(subject: Subject, folder: Path) -> int:
    """What the run that goes on has in its folder: newer checkpoints take the place of these."""
    path = subject.settings.get("ckpt_path")
    commits = [one.commit for one in scan(folder) if one.commit is not None and not one.problem]
    name = as_checkpoint(path).name if path else None
    runs = [commit.run for commit in commits if commit.resumable and name in ("last", commit.name)]
    return sum(commit.size for commit in commits if commit.run in runs[:1])


def _kept(settings: Any, steps: int | None) -> tuple[int, int]:
    """Most checkpoints at one time, whole ones and those of weights alone, in a run of so many steps."""
    options = settings.get("options") or {}
    keep_last = int(settings.get("keep_last") or 2)
    best = int(options.get("save_top_k", 1)) if settings.get("monitor") else 0
    parts = keep_last if int(settings.get("optimizer_every_n_saves") or 1) > 1 else 0
    every = int(options.get("keep_every_n_steps") or 0)
    ever = steps // every if every and steps else 0
    return keep_last + best + ever + 1, parts  # one more: the next is written before the oldest goes


def _saved_bytes(subject: Subject, trainable_only: bool) -> tuple[int, int]:
    """Sizes of the two slots, over all ranks."""
    module = copy.deepcopy(subject.shaped_model())
    precision = str(subject.trainer.get("precision") or "32-true")
    if precision.endswith("-true"):
        FSDP2Precision(precision).convert_module(module)
    attach_trainer(module, MemorySettings(), 1, 1, None)
    try:
        optimizers = optimizers_of(module)
    except (RuntimeError, AttributeError) as error:  # one that looks at the device of its parameters, or at the Trainer
        raise Skipped(f"the optimizer cannot be built by shapes: {' '.join(str(error).split())}") from error
    slots = weights_of(module, trainable_only), expected_optimizer_tensors(module, optimizers)
    sizes = [sum(tensor.numel() * tensor.element_size() for tensor in slot.values()) for slot in slots]
    return sizes[0], sizes[1]


def check_port(subject: Subject) -> Check:
    """Whether processes can meet: the port that is set, or any."""
    processes = (subject.devices or 1) * subject.nodes
    given, host = os.environ.get("MASTER_PORT"), os.environ.get("MASTER_ADDR", "127.0.0.1")
    if given is not None and host not in ("127.0.0.1", "localhost", socket.gethostname()):
        raise Skipped(f"the processes meet at {host}, which is not this machine")
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", int(given or 0)))
    except (OSError, ValueError) as error:
        fix = "Set another MASTER_PORT, or unset it, and Lightning chooses one."
        raise ConfigurationError("MASTER_PORT", "must be a free port", f"{given}: {error}", fix) from None
    return Check("port", "fine", f"{given or 'any'}, for {counted(processes, 'process')}")
