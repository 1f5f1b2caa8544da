"""Which slot a source has, what it is called, and how its name is written in a key of a logger.

A key must survive every logger, and two sources must never share one: TensorBoard turns ``my code`` into ``my_code``,
MLflow makes files of names. Keys are given once and kept through resumes, also when sources come and go.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_longctx.errors import BatchContractError, ConfigurationError

__all__ = ["OPEN_SLOTS", "UNSAFE", "SafeNames", "SourceTable", "agree_on_names", "exchanged"]

#: How many source ids are told apart where nobody names them beforehand. A fixed number, since the reduced tensor has
#: one row for each on every rank.
OPEN_SLOTS = 1024

#: What some logger does not take in a key.
UNSAFE = re.compile(r"[^A-Za-z0-9_.\-]")
_MAX_KEY = 100
# Bytes of a name as ranks exchange it; longer ones are cut.
_NAME_BYTES = 120


class SafeNames:
    """Gives each name a key that every logger takes, and never one key twice.

    Letters, digits, ``_``, ``-`` and ``.`` stay, anything else becomes ``_``. A key that is taken gets a suffix made
    from the name.

    Args:
        reserved: keys that no name gets.

    Example:
        >>> names = SafeNames()
        >>> names("web"), names("my code"), names("my_code")
        ('web', 'my_code', 'my_code-6595c1')
    """

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        self._reserved = frozenset(reserved)
        self._keys: dict[str, str] = {}

    def __call__(self, name: str) -> str:
        """Return the key of a name, the same one each time."""
        if name not in self._keys:
            self._keys[name] = self._new(name)
        return self._keys[name]

    def _new(self, name: str) -> str:
        taken = self._reserved | set(self._keys.values())
        plain = UNSAFE.sub("_", name)[:_MAX_KEY] or "_"
        digest = sha256(name.encode(errors="backslashreplace")).hexdigest()
        # File systems and some loggers do not tell upper from lower case.
        lower = {key.lower() for key in taken}
        candidates = (plain, *(f"{plain}-{digest[:length]}" for length in range(6, 65)))
        return next(key for key in candidates if key.lower() not in lower)

    def state_dict(self) -> dict[str, str]:
        """Return the keys by name."""
        return dict(self._keys)

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Keep the keys of an earlier run."""
        self._keys = dict(state)


class SourceTable:
    """Maps source ids to slots ``0 .. slots - 1``, and slots to names.

    Args:
        names: by source id, as a sequence or a mapping (for ids such as 90210). Ids that are not named are unknown.
            None: :data:`OPEN_SLOTS` ids from 0 on, called ``source_<id>`` until a name is learned.

    Attributes:
        slots: number of slots; fixed, and the same on every rank.

    Raises:
        ConfigurationError: no name, an empty one, or one name for two ids.

    Example:
        >>> table = SourceTable({7: "code", 90210: "web"})
        >>> table.slots_of(torch.tensor([90210, 7, 8])).tolist(), table.name(1)
        ([1, 0, -1], 'web')
    """

    def __init__(self, names: Sequence[str] | Mapping[int, str] | None = None) -> None:
        self._ids: list[int] | None = None
        if isinstance(names, Mapping):
            _check_ids(names)
            self._ids = sorted(names)
            names = [names[number] for number in self._ids]
        if names is not None:
            _check_names(names)
        self.is_open = names is None
        self.slots = OPEN_SLOTS if names is None else len(names)
        self._names = dict(enumerate(names or ()))
        self._lookup: Tensor | None = None

    def slots_of(self, ids: Tensor) -> Tensor:
        """Slots of a tensor of ids: int32, same shape, on its device; -1 or ``slots`` where unknown."""
        if self._ids is None or self._ids == list(range(self.slots)):
            return ids.clamp(-1, self.slots).to(torch.int32)  # clamped first, or an id of 2^32 would become 0
        if self._lookup is None or self._lookup.device != ids.device:
            self._lookup = torch.tensor(self._ids, device=ids.device)
        at = torch.searchsorted(self._lookup, ids.to(self._lookup.dtype), out_int32=True).clamp_(max=self.slots - 1)
        return torch.where(self._lookup[at] == ids, at, -1)

    def ids_of_names(self, names: Sequence[str]) -> Tensor:
        """Ids of sources given by name: int64, on the host; -1 for a name that is not in the table.

        Raises:
            BatchContractError: the table does not know names beforehand.
        """
        if self.is_open:
            fix = "Give all of them as `source_names`, so that every rank knows them."
            raise BatchContractError("batch[source_key]", "must hold numbers, or names that are known", names[0], fix)
        ids = self._ids or range(self.slots)
        by_name = {self._names[slot]: number for slot, number in enumerate(ids)}
        return torch.tensor([by_name.get(name, -1) for name in names])

    def name(self, slot: int) -> str:
        """The source's name."""
        return self._names.get(slot, f"source_{slot}")

    def names(self) -> list[str]:
        """The names of all slots."""
        return [self.name(slot) for slot in range(self.slots)]

    def learn(self, slot: int, name: str) -> bool:
        """Name a slot of an open table, unless it has a name or another slot has this one.

        Returns:
            Whether the slot has this name now: a source has one name, and a name one source. True too for a slot that
            is not in the table, and for a closed table, whose names are given.
        """
        if not self.is_open or not 0 <= slot < self.slots:
            return True
        if slot not in self._names and name not in self._names.values():
            self._names[slot] = name
        return self._names.get(slot) == name

    def contradiction(self, slot: int, name: str) -> str:
        """Say in words what :meth:`learn` refused."""
        other = next((other for other, known in self._names.items() if known == name), None)
        if other is not None:
            return f"{name!r} for the ids {other} and {slot}"
        return f"id {slot} for {self.name(slot)!r} and {name!r}"

    def knows(self, names: Iterable[str]) -> bool:
        """Whether all of these names are in the table."""
        return set(names) <= set(self._names.values())

    def learned(self) -> dict[int, str]:
        """Names by slot, of an open table; empty for a closed one."""
        return dict(self._names) if self.is_open else {}


def exchanged(name: str) -> str:
    """A name as ranks exchange it: its first 120 bytes."""
    return name.encode()[:_NAME_BYTES].decode(errors="ignore")


def agree_on_names(table: SourceTable, found: Mapping[int, str], group: dist.ProcessGroup | None) -> list[str]:
    """Teach each rank's table what any rank has found: one gather of a fixed shape, without objects.

    Where ranks disagree, the first one in the group is right for all.

    Args:
        table: an open table.
        found: names by slot that this rank has read in its batches.
        group: of the ranks that call this together; None for one rank.

    Returns:
        What contradicts each other, the same on all ranks.
    """
    if group is None:
        everyone = [found]
    else:
        mine = torch.zeros(table.slots, _NAME_BYTES, dtype=torch.uint8)
        for slot, name in found.items():
            if 0 <= slot < table.slots:
                data = name.encode()[:_NAME_BYTES]
                mine[slot, : len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        device = "cpu" if dist.get_backend(group) == "gloo" else torch.accelerator.current_accelerator()
        mine = mine.to(device)
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, mine, group=group)
        everyone = [_decode(part.cpu()) for part in gathered]
    return [
        table.contradiction(slot, name)
        for names in everyone
        for slot, name in sorted(names.items())
        if not table.learn(slot, name)
    ]


def _decode(part: Tensor) -> dict[int, str]:
    named = part.any(1).nonzero().flatten().tolist()
    return {slot: bytes(part[slot].tolist()).rstrip(b"\0").decode(errors="ignore") for slot in named}


def _check_ids(names: Mapping[int, str]) -> None:
    wrong = [number for number in names if isinstance(number, bool) or not isinstance(number, int) or number < 0]
    if wrong:
        fix = "Give names by id, such as {0: web, 7: code}; -1 is padding."
        raise ConfigurationError("ChannelLoss.source_names", "must have ids from 0 on", wrong[0], fix)


def _check_names(names: Sequence[str]) -> None:
    fix = "Give each source one name of its own, in a list or by id."
    if isinstance(names, str) or not names or not all(isinstance(name, str) and name for name in names):
        raise ConfigurationError("ChannelLoss.source_names", "must hold names", repr(names), fix)
    twice = sorted({name for name in names if list(names).count(name) > 1})
    if twice:
        raise ConfigurationError("ChannelLoss.source_names", "must differ", f"{twice} more than once", fix)
