"""One checkpoint, opened for reading: its weights, optimizers and extra state for the layout of now.

Nothing is left out in silence. What is missing or does not fit is an error that names it, or, where the caller says so,
one warning.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_longctx.checkpoint.address import Folder, PathLike
from lightning_longctx.checkpoint.discovery import DEEP_BYTES, as_checkpoint, file_problem, verify, was_verified
from lightning_longctx.checkpoint.exchange import all_gather_json
from lightning_longctx.checkpoint.layout import METADATA, OPTIMIZER, PACKED_INDEX, WEIGHTS, Commit, extra_file
from lightning_longctx.checkpoint.plain import load_plain
from lightning_longctx.checkpoint.reading import TensorDirectory
from lightning_longctx.checkpoint.states import load_optimizer, plain_name, split_tensors, trainable_names
from lightning_longctx.errors import CheckpointError
from lightning_longctx.topology import Topology

__all__ = ["LOCAL_STATES", "RUN_STATE", "OnMissing", "OpenCheckpoint", "agree_or_raise", "load_weights"]

OnMissing = Literal["error", "warn"]

#: Key of the data state: the states of all ranks that are needed, which the data module joins.
LOCAL_STATES = "local_states"
#: Key of what only the callback restores.
RUN_STATE = "longctx_run"


class OpenCheckpoint:
    """A checkpoint that was found intact.

    The first rank compares all sizes, and the checksums of what is read. The others check all they read but tensors.

    Args:
        path: its directory.
        on_missing: what to do about state that is missing or does not fit.
        trust_pickle: let the checkpoint run code.
        deep_bytes: compare the checksums of tensor data up to this size in all; None: always.

    Raises:
        CheckpointError: it is incomplete or damaged.
    """

    def __init__(
        self,
        path: PathLike,
        on_missing: OnMissing = "error",
        trust_pickle: bool = False,
        deep_bytes: int | None = DEEP_BYTES,
    ) -> None:
        self.path = as_checkpoint(path)
        self.commit = Commit.read(self.path)
        self._checks = not dist.is_initialized() or dist.get_rank() == 0
        if self._checks:
            self._refuse(verify(self.path, deep_bytes=0))
        self._on_missing = on_missing
        self._trust_pickle = trust_pickle
        self._changed: set[str] = set()  # parameters of another size, whose moments are of no use either
        self._deep = deep_bytes is None or self.commit.size <= deep_bytes

    # -- weights -------------------------------------------------------------------------------------------------------

    def weights(self) -> TensorDirectory:
        """The tensors of the model, by name.

        Raises:
            CheckpointError: it holds none.
        """
        return self._slot(WEIGHTS)

    def load_weights(self, module: Module, strict: bool = True) -> None:
        """Load the weights into a module of any layout, in place.

        Args:
            module: plain, or sharded with FSDP2.
            strict: every name must be on both sides. False: those that are.

        Raises:
            CheckpointError: names or sizes differ.
        """
        if WEIGHTS not in self.commit.slots and self.commit.resumable:
            return  # of a run that trains nothing
        directory = self.weights()
        tensors, other = split_tensors(module.state_dict())
        keys = {plain_name(key): key for key in tensors}
        names = self._fitting(
            directory, {name: tensors[key] for name, key in keys.items()}, self._frozen(module), strict
        )
        known = {name: tensors[keys[name]] for name in names}
        directory.read_into(known)
        saved = self.rank_extra(0).get("weights_extra", {})
        state = {keys[name]: value for name, value in known.items()}
        state |= {key: saved[key] for key in other if key in saved}
        module.load_state_dict(state, strict=False)  # for hooks of the module; the tensors are in place

    def check_weights(self, module: Module) -> None:
        """Make sure that the weights fit a module, by names and sizes; it may be one without values.

        Raises:
            CheckpointError: they do not.
        """
        if WEIGHTS in self.commit.slots:
            tensors, _ = split_tensors(module.state_dict())
            targets = {plain_name(key): tensor for key, tensor in tensors.items()}
            self._fitting(self.weights(), targets, self._frozen(module), strict=True)

    def full_weights(self, module: Module | None = None, strict: bool = True) -> dict[str, Any]:
        """All weights on the host, as ``module.load_state_dict`` takes them.

        Args:
            module: what they are for: its names and sizes must fit, and it gives what was not saved.
            strict: every name must be on both sides.

        Raises:
            CheckpointError: names or sizes differ.
        """
        present = {} if module is None else dict(module.state_dict())
        if WEIGHTS not in self.commit.slots and self.commit.resumable:
            return present
        directory, extra = self.weights(), self.rank_extra(0).get("weights_extra", {})
        if module is None:
            return {**{name: directory.read(name) for name in directory}, **extra}
        tensors, _ = split_tensors(present)
        keys = {plain_name(key): key for key in tensors}
        names = self._fitting(
            directory, {name: tensors[key] for name, key in keys.items()}, self._frozen(module), strict
        )
        loaded = {keys[name]: directory.read(name) for name in names}
        return present | loaded | {key: value for key, value in extra.items() if key in present}

    def _fitting(
        self, directory: TensorDirectory, targets: Mapping[str, Tensor], frozen: set[str], strict: bool
    ) -> list[str]:
        """Names that both sides have with one size; what else there is is reported."""
        known = [name for name in targets if name in directory]
        if not strict:
            return known
        self._changed = {name for name in known if tuple(targets[name].shape) != directory[name].size}
        problems = [f"no weights were saved for `{name}`" for name in sorted(set(targets) - set(known) - frozen)]
        problems += [f"the model has no `{name}`" for name in sorted(set(directory) - set(targets))]
        problems += [
            f"`{name}` has the size {tuple(targets[name].shape)}, and {directory[name].size} was saved"
            for name in sorted(self._changed)
        ]
        self._report(problems)
        return [name for name in known if name not in self._changed]

    # -- optimizers ----------------------------------------------------------------------------------------------------

    def optimizers(self) -> TensorDirectory:
        """The tensors of the optimizers, by name.

        Raises:
            CheckpointError: it holds none.
        """
        return self._slot(OPTIMIZER)

    def require_resumable(self) -> None:
        """Make sure that training can go on from here.

        Raises:
            CheckpointError: it holds weights only, unless that is to be a warning.
        """
        if not self.commit.resumable:
            self._report([f"{self.path.name} holds {self.commit.slots}, and no state of the optimizer"])

    def fit_schedulers(self, state: Mapping[str, Any], schedulers: Sequence[Any]) -> None:
        """Make sure that the saved schedulers are those of the run, before Lightning restores them one by one.

        Args:
            state: with ``lr_schedulers``; the states of those that start anew are replaced in it.
            schedulers: of the run.

        Raises:
            CheckpointError: another number of schedulers, or of another class.
        """
        saved, kinds = state["lr_schedulers"], self.rank_extra(0).get("schedulers", [])
        problems = []
        if len(saved) != len(schedulers):
            problems.append(f"{len(saved)} learning rate schedulers were saved and there are {len(schedulers)}")
        for number, (scheduler, kind) in enumerate(zip(schedulers, kinds, strict=False)):
            if type(scheduler).__name__ != kind:
                problems.append(f"scheduler {number} is {type(scheduler).__name__}, and {kind} was saved")
                saved[number] = scheduler.state_dict()
        self._report(problems)

    def load_optimizers(self, module: Module, optimizers: Sequence[Optimizer]) -> None:
        """Load the state of all optimizers, by name of the parameter.

        Raises:
            CheckpointError: another number of optimizers, of parameters or of groups.
        """
        saved = self.rank_extra(0).get("optimizers")
        if saved is None or OPTIMIZER not in self.commit.slots:
            if optimizers and self.commit.slots:
                self._report(["the optimizers' state is missing"])
            return
        problems = []
        if len(saved) != len(optimizers):
            problems.append(f"{len(saved)} optimizers were saved and there are {len(optimizers)}")
        directory = self._slot(OPTIMIZER)
        for number, (entry, optimizer) in enumerate(zip(saved, optimizers, strict=False)):
            problems += load_optimizer(directory, number, entry, optimizer, module, self._changed)
        self._report(problems)

    # -- extra state ---------------------------------------------------------------------------------------------------

    def rank_extra(self, rank: int) -> dict[str, Any]:
        """Extra state of one of the ranks that saved."""
        self._refuse(file_problem(self.path, self.commit, extra_file(rank)))
        loaded: dict[str, Any] = load_plain(self.path / extra_file(rank), self._trust_pickle)
        return loaded

    def same_layout(self, topology: Topology) -> bool:
        """Whether as many ranks hold the same parts of rows as when it was saved."""
        sizes = (max(dp for dp, _ in self.commit.ranks) + 1, max(sp for _, sp in self.commit.ranks) + 1)
        return len(self.commit.ranks) == topology.world_size and sizes == (topology.dp_size, topology.sp_size)

    def extra_state(self, topology: Topology) -> dict[str, Any]:
        """Extra state for this rank.

        In the same layout it is the rank's own. In another one it is that of the first rank, which is right for what
        all ranks share (loops, schedulers, callbacks), and ``rng`` is left out. The data state holds the states of
        all former ranks that are needed.
        """
        same = self.same_layout(topology)
        own = self.rank_extra(topology.rank if same else 0)
        if not same:
            own.pop("rng", None)
        data = own.pop("data", None)
        if data is not None:
            own["data"] = {**data, "state": self._data_state(data, topology, same)}
        return own

    def run_state(self, topology: Topology) -> dict[str, Any]:
        """What Lightning restores besides weights and optimizers, in the form of its own checkpoints.

        Besides Lightning's keys there is :data:`RUN_STATE`, for the callback: random numbers, loggers, and what the
        checkpoint is.
        """
        extra = self.extra_state(topology)
        state: dict[str, Any] = dict(extra["lightning"])
        if "data" in extra:
            state[extra["data"]["key"]] = extra["data"]["state"]
        state[RUN_STATE] = {
            "path": str(self.path),
            "commit": self.commit,
            "rng": extra.get("rng"),
            "loggers": extra.get("loggers", []),
            "logged_steps": extra.get("logged_steps", self.commit.step),
            "data": extra.get("data", {}).get("key"),
        }
        return state

    def joined_data_state(self) -> Any:
        """The data state of all ranks, as a data module takes it on any layout."""
        data = self.rank_extra(0)["data"]
        if not data["local"]:
            return data["state"]
        states = [self.rank_extra(rank)["data"]["state"] for rank in range(len(self.commit.ranks))]
        return {LOCAL_STATES: [state for state in states if state]}

    def _data_state(self, data: Mapping[str, Any], topology: Topology, same: bool) -> Any:
        if not data["local"]:
            return data["state"]
        needed = [rank for rank, (dp, _) in enumerate(self.commit.ranks) if not same or dp == topology.dp_rank]
        states = [self.rank_extra(rank)["data"]["state"] for rank in needed]
        return {LOCAL_STATES: [state for state in states if state]}

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _slot(self, name: str) -> TensorDirectory:
        if name not in self.commit.slots:
            fix = "Use a checkpoint that holds them (`longctx checkpoint list`)."
            raise CheckpointError(str(self.path), f"must hold {name}", self.commit.slots or "extra state only", fix)
        for file in (METADATA, PACKED_INDEX):
            self._refuse(file_problem(self.path, self.commit, f"{name}/{file}"))
        if self._checks and self._deep and not was_verified(self.path, self.commit):
            for file in self.commit.files:
                self._refuse(file_problem(self.path, self.commit, file) if file.startswith(f"{name}/") else "")
        return TensorDirectory(self.path / name, self._trust_pickle)

    def _refuse(self, problem: str) -> None:
        if problem:
            raise CheckpointError(str(self.path), "must be complete and intact", problem, "Use another checkpoint.")

    def _frozen(self, module: Module) -> set[str]:
        if not self.commit.trainable_only:
            return set()
        return {plain_name(key) for key in module.state_dict()} - trainable_names(module)

    def _report(self, problems: Sequence[str]) -> None:
        if not problems:
            return
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        if self._on_missing == "warn":
            warnings.warn(f"{self.path.name} does not fit: {shown}", UserWarning, stacklevel=3)
            return
        fix = (
            "Build the run as it was saved, name another folder (`dirpath`) to start anew, or set `on_missing: warn` to"
            " start what is missing anew."
        )
        raise CheckpointError(str(self.path), "must fit the run", shown, fix)


def load_weights(path: PathLike, module: Module, strict: bool = True) -> Module:
    """Load the weights of a checkpoint into a plain module: no trainer, no processes.

    Args:
        path: directory of a checkpoint.
        module: what was trained, or a part of it with the same names (``strict=False``).
        strict: every name must be on both sides.

    Returns:
        The module.

    Raises:
        CheckpointError: the checkpoint is damaged, or does not fit.
    """
    OpenCheckpoint(path).load_weights(module, strict)
    return module


def agree_or_raise(
    error: CheckpointError | None, group: dist.ProcessGroup | None, record: Folder | None = None
) -> None:
    """Raise an error that any rank met, on every rank, so that nobody waits for one that is gone.

    Args:
        error: this rank's.
        group: all ranks; needs a CPU backend.
        record: a file that all ranks must have read alike; None: nothing is compared.

    Raises:
        CheckpointError: this rank's own, a report of the others', or ranks that do not see the same store.
    """
    seen = None
    try:
        seen = None if error is not None or record is None else zlib.crc32(record.read_bytes())
    except OSError as problem:
        fix = "Put `dirpath` on a store that all nodes share."
        error = CheckpointError(str(record), "must be readable on every rank", problem.strerror, fix)
    answers = all_gather_json([None if error is None else str(error), seen], group)
    texts = [text for text, _ in answers]
    if error is not None:
        raise error
    failed = {rank: text for rank, text in enumerate(texts) if text}
    if failed:
        rank, text = next(iter(failed.items()))
        fix = "See the message of that rank."
        raise CheckpointError("checkpoint", "must load on every rank", f"{text} (rank {rank})", fix)
    if len({found for _, found in answers}) > 1:
        fix = "Put `dirpath` on a store that all nodes share."
        raise CheckpointError(str(record), "must be the same file on every rank", "different contents", fix)
