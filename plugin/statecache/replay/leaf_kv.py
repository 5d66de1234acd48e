"""A bounded set of KV blocks, closed under parents, that drops what is of least use first."""

from __future__ import annotations

from fractions import Fraction
from heapq import heappop, heappush
from typing import TYPE_CHECKING

import msgspec

from statecache.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["LeafLruKv"]

_ROOT = 0
_Entry = tuple[int, int, int]


class _Use(msgspec.Struct, gc=False):
    """The last use of a state: its number, the request, and the kind of the state."""

    number: int
    request: int
    protected: bool


class LeafLruKv:
    """Which KV is resident, and which goes: always a leaf, one with no resident block below it.

    Leaves without a state go first, least recently used first. If there is none, a leaf with a
    state goes, and its state with it. Such leaves are protected or on probation: of the least
    recently used of either kind the one on probation goes if its age times `ratio` is above that of
    the protected one. Ages count requests since the state's last use. No block of the running
    request ever goes.

    Heaps have entries out of date, which are skipped: the stamp of a block or the use of a state
    tells. No two resident leaves share a stamp, for the blocks that one request stamped last form a
    chain.
    """

    def __init__(self, parents: Sequence[int], blocks: int, ratio: Fraction = Fraction(1)) -> None:
        if blocks < 1:
            raise SettingsError(f"{blocks} blocks are left to KV: give fewer slots")
        self.capacity_blocks = blocks
        self._parents = parents
        self._ratio = ratio
        self._used_blocks = 0
        self._request = 0
        self._stamps = [-1] * len(parents)  # the last request of a resident block; -1: absent
        self._children = [0] * len(parents)  # resident ones
        self._uses: dict[int, _Use] = {}  # of the resident states
        self._use_count = 0
        self._bare: list[tuple[int, int]] = []  # leaves without a state: stamp, node
        self._probation: list[_Entry] = []  # leaves with one: use, request, node
        self._protected: list[_Entry] = []

    def resident_prefix(self, path: Sequence[int]) -> int:
        """Return how many blocks of `path` are resident from its start on."""
        stamps = self._stamps
        return next((i for i, node in enumerate(path) if stamps[node] < 0), len(path))

    def start(self, path: Sequence[int], resident: int) -> None:
        """A request begins: its resident blocks are used."""
        self._request += 1
        for node in path[:resident]:
            self._stamps[node] = self._request

    def insert(self, path: Sequence[int], resident: int) -> list[int]:
        """Make the rest of `path` resident; return the states dropped to make room."""
        self._used_blocks += len(path) - resident
        lost = []
        while self._used_blocks > self.capacity_blocks:
            node = self._drop()
            if self._uses.pop(node, None):
                lost.append(node)
        for node in path[resident:]:
            self._stamps[node] = self._request
            self._children[self._parents[node]] += 1
        self._offer(path[-1])
        return lost

    def use_state(self, node: int, *, protected: bool | None = None) -> None:
        """The state at `node` was set or used; `protected` tells its kind (None: as it was)."""
        self._use_count += 1
        if protected is None:
            protected = self._uses[node].protected
        self._uses[node] = _Use(self._use_count, self._request, protected)
        self._offer(node)

    def drop_state(self, node: int) -> None:
        """The state at `node` is gone, its KV is not."""
        del self._uses[node]
        self._offer(node)

    def _offer(self, node: int) -> None:
        """Note `node` as one that may go, if it is a leaf."""
        if self._children[node]:
            return
        use = self._uses.get(node)
        if use is None:
            heappush(self._bare, (self._stamps[node], node))
        else:
            heap = self._protected if use.protected else self._probation
            heappush(heap, (use.number, use.request, node))

    def _drop(self) -> int:
        node = self._next_bare()
        if node is None:
            node = self._next_with_state()
        self._stamps[node] = -1
        self._used_blocks -= 1
        parent = self._parents[node]
        self._children[parent] -= 1
        if parent != _ROOT and self._stamps[parent] != self._request:
            self._offer(parent)
        return node

    def _next_bare(self) -> int | None:
        while self._bare:
            stamp, node = heappop(self._bare)
            if (
                self._stamps[node] == stamp != self._request
                and not self._children[node]
                and node not in self._uses
            ):
                return node
        return None

    def _next_with_state(self) -> int:
        protected, probation = self._first(self._protected), self._first(self._probation)
        heap = self._protected
        if protected is None or (probation and self._probation_goes(probation, protected)):
            heap = self._probation
        return heappop(heap)[2]

    def _probation_goes(self, probation: _Entry, protected: _Entry) -> bool:
        now = self._request + 1
        probation_age, protected_age = now - probation[1], now - protected[1]
        scaled = self._ratio.numerator * probation_age
        other = self._ratio.denominator * protected_age
        return scaled > other or (scaled == other and probation < protected)

    def _first(self, heap: list[_Entry]) -> _Entry | None:
        """Return the entry of the heap that is up to date, and drop those before it."""
        while heap:
            number, _, node = heap[0]
            use = self._uses.get(node)
            if (
                use
                and use.number == number
                and not self._children[node]
                and self._stamps[node] != self._request
            ):
                return heap[0]
            heappop(heap)
        return None
