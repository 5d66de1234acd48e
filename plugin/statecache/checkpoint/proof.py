"""What each slot says of the state in it, and whether its bytes are those that were stored.

Both are compared when a state is to be restored. What does not fit is never restored: the caller
computes the prompt again. Importing this loads no torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Prefix", "SlotRecords", "is_picked"]

_KEYS = 1 << 64
_T = TypeVar("_T")
_R = TypeVar("_R")
_log = logging.getLogger("statecache.checkpoint")


class Prefix(NamedTuple):
    """What a state is of: a hash of 64 bits of all its tokens, namespace included, and how many."""

    key: int
    depth: int


class _Record(NamedTuple):
    prefix: Prefix
    sums: Tensor | None


def is_picked(key: int, rate: float) -> bool:
    """Whether the prefix with this key is of the share `rate` that is looked at closely.

    The same on every rank and in every run; what is picked at one rate is at any higher one.
    """
    return key % _KEYS < rate * _KEYS


class SlotRecords:
    """The records of the slots of one pool: written behind each store, compared at each restore.

    `sums(slot)` adds up the bytes of a slot (`CheckpointPool.checksums`). It is called for the
    share `rate` of prefixes alone, and no more once it failed: a closer look must not end a server.
    """

    def __init__(self, rate: float, sums: Callable[[int], Tensor]) -> None:
        self.rate = rate
        self._sums = sums
        self._records: dict[int, _Record] = {}

    def write(self, slot: int, prefix: Prefix) -> bool:
        """The state of `prefix` was stored in this slot; return whether its bytes were added up."""
        self._records.pop(slot, None)
        picked = is_picked(prefix.key, self.rate)
        sums = self.look(self._sums, slot) if picked else None
        self._records[slot] = _Record(prefix, sums)
        return sums is not None

    def erase(self, slots: Iterable[int]) -> None:
        """These slots hold no state any more."""
        for slot in slots:
            self._records.pop(slot, None)

    def clear(self) -> None:
        """No slot holds a state any more."""
        self._records.clear()

    def mismatch(self, slot: int, prefix: Prefix) -> str | None:
        """Return what of the record does not fit `prefix`, None if all does.

        `empty`: nothing was stored in this slot.
        """
        record = self._records.get(slot)
        if record is None:
            return "empty"
        if record.prefix.depth != prefix.depth:
            return "depth"
        return None if record.prefix.key == prefix.key else "prefix"

    def sums(self, slot: int) -> tuple[Tensor, Tensor] | None:
        """Return the sums of a slot's bytes as stored and now, None where none were taken.

        Comparing them waits for the device.
        """
        record = self._records.get(slot)
        if not self.rate or record is None or record.sums is None:
            return None
        now = self.look(self._sums, slot)
        return None if now is None else (record.sums, now)

    def look(self, call: Callable[[_T], _R], argument: _T) -> _R | None:
        """Return what `call` returns; None, and nothing is picked from now on, if it fails."""
        try:
            return call(argument)
        except Exception:
            self.rate = 0.0
            _log.exception(
                "statecache: a checkpoint could not be looked at closely; none is any more"
            )
            return None
