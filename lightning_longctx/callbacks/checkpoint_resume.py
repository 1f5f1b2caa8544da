"""What the callback restores by itself, and how Lightning's counts fit another number of ranks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DataLoader

from lightning_longctx.callbacks.checkpoint_report import shown
from lightning_longctx.checkpoint.address import Folder, as_folder
from lightning_longctx.checkpoint.exchange import all_gather_json
from lightning_longctx.checkpoint.layout import Commit
from lightning_longctx.checkpoint.restore import RUN_STATE
from lightning_longctx.checkpoint.rng import reseed, restore_rng
from lightning_longctx.errors import CheckpointError
from lightning_longctx.topology import topology_of
from lightning_longctx.units import counted

__all__ = [
    "Resumed",
    "agree_on_last",
    "check_data",
    "follow_accumulation",
    "hide_lightnings_hint",
    "realign_windows",
    "renew_iterator",
    "take_resumed",
]


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that a fit goes on from.

    Attributes:
        path: its directory.
        commit: its record.
        rng: random number generators of this rank; None in another layout.
        loggers: identities of its loggers.
        logged_steps: steps done, as loggers number them.
        data: class of the data module whose state it has; None if it has none.
    """

    path: Folder
    commit: Commit
    rng: dict[str, Any] | None
    loggers: list[dict[str, Any]]
    logged_steps: int
    data: str | None

    def restore_random_numbers(self, rank: int) -> None:
        """Put this rank's generators back; in another layout seed them anew, from the checkpoint and the rank."""
        if self.rng is not None:
            restore_rng(self.rng)
        else:
            reseed(self.commit.attempt, rank)

    def announce(self, trainer: pl.Trainer) -> None:
        """Say where the run goes on."""
        text = f"Resumed at step {self.commit.step} from {shown(self.path)}."
        if self.data is not None:
            text += " The data goes on after the last row of that step: nothing is repeated or lost."
        if self.rng is None:
            text += f" It was saved by {counted(len(self.commit.ranks), 'process')}: weights, optimizer and data were"
            text += " dealt anew, random numbers start from new seeds."
        rank_zero_info(text)


def take_resumed(checkpoint: dict[str, Any]) -> Resumed | None:
    """Take our own part out of a loaded checkpoint; None if it is not one of ours."""
    state = checkpoint.pop(RUN_STATE, None)
    if state is None:
        return None
    return Resumed(**{**state, "path": as_folder(state["path"])})


def check_data(trainer: pl.Trainer, resumed: Resumed, warn_only: bool) -> None:
    """Make sure that saved data state finds its data module, and a stateful data module its state.

    Raises:
        CheckpointError: one of them is missing.
    """
    data = getattr(trainer, "datamodule", None)
    present = type(data).__qualname__ if data is not None else None
    if resumed.data == present or (resumed.data is None and not hasattr(data, "local_state_dict")):
        return
    got = f"state of {resumed.data or 'no data module'} for {present or 'no data module'}"
    if warn_only:
        warnings.warn(f"The data starts anew: {resumed.path.name} has {got}", UserWarning, stacklevel=2)
        return
    fix = "Resume with the same data module, or set `on_missing: warn` to start the data anew."
    raise CheckpointError(str(resumed.path), "must hold the state of the data", got, fix)


def realign_windows(loops: Mapping[str, Any], saved: int, present: int) -> None:
    """Count micro-batches of the epoch as if steps had always had the present number of them.

    Lightning finds the end of an accumulation window by counting micro-batches. Where ranks changed and the tokens of a
    step did not, a step has another number of them, and the count must stand at the end of a window again. Those of a
    window that was open stay beyond it: whoever gives them again takes them off.

    Args:
        loops: Lightning's loop state, changed in place.
        saved: micro-batches of a step when it was saved.
        present: now.
    """
    if saved == present:
        return
    progress = loops["fit_loop"]["epoch_loop.batch_progress"]
    current, total = progress["current"], progress["total"]
    windows, beyond = divmod(current["ready"], saved)
    if beyond and progress.get("is_last_batch"):  # the last window of an epoch may be short
        windows, beyond = windows + 1, 0
    change = windows * present + beyond - current["ready"]
    for key in current:
        total[key] += change
        current[key] += change


def agree_on_last(trainer: pl.Trainer, found: str) -> None:
    """Make sure that all ranks found a checkpoint for ``last``, or none did: one rank would wait for the others.

    Args:
        trainer: its processes are connected.
        found: name of the checkpoint that this rank found; empty if it found none.

    Raises:
        CheckpointError: ranks do not see the same store; on every rank.
    """
    names = all_gather_json(found, topology_of(trainer).host_group)
    if any(names) and not all(names):
        got = ", ".join(f"{name or 'none'} on rank {rank}" for rank, name in enumerate(names))
        fix = "Put `dirpath` on a store that all nodes share."
        raise CheckpointError("ckpt_path: last", "must find a checkpoint on every rank", got, fix)


def follow_accumulation(trainer: pl.Trainer, epoch: int) -> None:
    """Let a ``GradientAccumulationScheduler`` set the micro-batches of a step: Lightning asks it for later epochs only.

    Args:
        trainer: the run.
        epoch: the one that the run is in.
    """
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # a connector sets it
    for one in callbacks:
        if isinstance(one, GradientAccumulationScheduler):
            trainer.accumulate_grad_batches = one.get_accumulate_grad_batches(epoch)


def renew_iterator(trainer: pl.Trainer) -> None:
    """At the end of an epoch, begin the next one with the restored random numbers.

    Lightning makes the iterator of a resumed epoch before they are back, and a plain ``DataLoader`` draws its order
    from them. Loaders that keep a state of their own have been put where they were, and are left alone.
    """
    loop = trainer.fit_loop
    loaders = loop._combined_loader.flattened if loop._combined_loader is not None else []
    plain = all(isinstance(one, DataLoader) and not hasattr(one, "load_state_dict") for one in loaders)
    if plain and loop.epoch_loop.batch_progress.current.ready >= loop.max_batches and loop._data_fetcher is not None:
        iter(loop._data_fetcher)


def hide_lightnings_hint() -> None:
    """Lightning would advise ``save_last`` of another callback where the first run finds nothing to resume."""
    warnings.filterwarnings("ignore", message=r".*there is no last checkpoint available", category=UserWarning)
