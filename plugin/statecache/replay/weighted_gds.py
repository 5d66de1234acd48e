"""GreedyDual-Size with an interior weight: a setting to compare with, which engines do not have."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from statecache.errors import SettingsError

if TYPE_CHECKING:
    from statecache import CostModel

__all__ = ["WeightedGds"]


class _State:
    __slots__ = ("children", "depth", "last_use", "parent", "pinned", "stamp")

    def __init__(self, depth: int, parent: int | None) -> None:
        self.depth = depth
        self.parent = parent
        self.children: set[int] = set()
        self.pinned = False
        self.stamp = 0.0
        self.last_use = 0


class WeightedGds:
    """As `StateIndex` under gds, but a state with others below it counts its gain `weight` times.

    Each entry of the heap is the priority its state had at some time after its last use; a state
    whose priority changes in between gets another entry, and entries out of date are skipped.
    """

    def __init__(self, weight: float, cost: CostModel) -> None:
        if not 0 <= weight <= 1:
            raise SettingsError(f"interior-weight is {weight}: give a number from 0 to 1")
        self._weight = weight
        self._cost = cost
        self._states: dict[int, _State] = {}
        self._heap: list[tuple[float, int, int]] = []  # priority, last use, state
        self._watermark = 0.0
        self._uses = 0

    def __len__(self) -> int:
        return len(self._states)

    def insert(
        self, state: int, depth: int, parent: int | None = None, children: Iterable[int] = ()
    ) -> None:
        """Add a state; `children` are all those that now sit directly below it."""
        new = self._states[state] = _State(depth, parent)
        new.children.update(children)
        if parent is not None:
            above = self._states[parent].children
            above -= new.children
            above.add(state)
            self._push(parent)
        for child in new.children:
            self._states[child].parent = state
            self._push(child)
        self.touch(state)

    def touch(self, state: int) -> None:
        """Stamp a state with the watermark."""
        used = self._states[state]
        self._uses += 1
        used.stamp, used.last_use = self._watermark, self._uses
        self._push(state)

    def pin(self, state: int) -> None:
        """Keep a state from being evicted."""
        self._states[state].pinned = True

    def unpin(self, state: int) -> None:
        """Let a state be evicted again, and stamp it."""
        self._states[state].pinned = False
        self.touch(state)

    def erase(self, state: int) -> None:
        """Forget a state; the watermark stays."""
        gone = self._states.pop(state)
        for child in gone.children:
            self._states[child].parent = gone.parent
            self._push(child)
        if gone.parent is not None:
            above = self._states[gone.parent].children
            above.remove(state)
            above |= gone.children
            self._push(gone.parent)

    def evict(self, n: int) -> list[int]:
        """Evict up to `n` states, the lowest priority first, and raise the watermark to each."""
        victims: list[int] = []
        while len(victims) < n and self._heap:
            priority, last_use, state = heappop(self._heap)
            held = self._states.get(state)
            if held is None or held.last_use != last_use or held.pinned:
                continue  # the last unpin makes a new entry
            if self.priority(state) != priority:
                continue
            self._watermark = max(self._watermark, priority)
            self.erase(state)
            victims.append(state)
        return victims

    def priority(self, state: int) -> float:
        """Return what the lowest of is evicted next."""
        held = self._states[state]
        above = 0 if held.parent is None else self._states[held.parent].depth
        gain = self._cost.cost(above, held.depth)
        return held.stamp + (self._weight * gain if held.children else gain)

    def _push(self, state: int) -> None:
        held = self._states[state]
        heappush(self._heap, (self.priority(state), held.last_use, state))
