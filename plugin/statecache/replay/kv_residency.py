"""Which KV is resident when a request is looked up: a bounded pool whose leaves go by LRU.

KV residency does not depend on states, so one timeline serves every policy and slot count.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

import msgspec

from statecache.errors import SettingsError
from statecache.replay.prefix_tree import ROOT, PrefixTree
from statecache.trace.format import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["KvPool", "KvTimeline", "kv_timeline"]


class KvTimeline(msgspec.Struct, frozen=True):
    """Resident KV, request by request; all lists are indexed by request.

    `resident[r]` is how many blocks of r's path are resident when it is looked up, -1 when r does
    not fit the pool alone; `dropped[r]` the nodes whose KV goes to make room for r.
    """

    resident: list[int]
    dropped: list[Sequence[int]]


def kv_timeline(tree: PrefixTree, kv_tokens: int | None) -> KvTimeline:
    """Play the trace against a KV pool of `kv_tokens` (rounded down to blocks; None: unlimited)."""
    if kv_tokens is None:
        return KvTimeline(tree.known, [()] * len(tree.paths))
    if kv_tokens < BLOCK_TOKENS:
        raise SettingsError(f"kv-tokens is {kv_tokens}: give at least one block of {BLOCK_TOKENS}")
    pool = KvPool(tree.parents, kv_tokens // BLOCK_TOKENS)
    resident: list[int] = []
    dropped: list[Sequence[int]] = []
    for now, path in enumerate(tree.paths):
        if len(path) > pool.capacity_blocks:
            resident.append(-1)
            dropped.append(())
        else:
            resident.append(pool.resident_prefix(path))
            dropped.append(pool.admit(now, path, resident[-1]))
    return KvTimeline(resident, dropped)


class KvPool:
    """A bounded set of resident nodes, closed under parents; leaves go least recently used first.

    `parents` may grow, and the number of a node that is not resident may get another parent.

    `_leaves` is a heap of (stamp, node) with one entry for each time a node became a leaf; a leaf
    that a later request stamped, as one that got a child was, no longer has the stamp of its entry,
    which is skipped. No two resident leaves share a stamp, because the nodes that one request
    stamped last form a chain.
    """

    def __init__(self, parents: list[int], capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self._parents = parents
        self._used_blocks = 0
        self._stamps = [-1] * len(parents)  # -1: not resident
        self._children = [0] * len(parents)  # resident ones
        self._leaves: list[tuple[int, int]] = []

    def resident_prefix(self, path: list[int]) -> int:
        """Return how many blocks of `path` are resident from its start on."""
        for blocks, node in enumerate(path):
            if self._stamps[node] < 0:
                return blocks
        return len(path)

    def admit(self, now: int, path: list[int], resident: int) -> list[int]:
        """Make all of `path` resident for request `now`; return the nodes dropped for it."""
        self._grow()
        for node in path[:resident]:
            self._stamps[node] = now
        self._used_blocks += len(path) - resident
        dropped = []
        while self._used_blocks > self.capacity_blocks:
            dropped.append(self._drop_leaf(now))
        for node in path[resident:]:
            self._stamps[node] = now
            self._children[self._parents[node]] += 1
        if self._children[path[-1]] == 0:
            heappush(self._leaves, (now, path[-1]))
        return dropped

    def _grow(self) -> None:
        """Know the nodes that are new; drop entries out of date when they are most of the heap."""
        more = len(self._parents) - len(self._stamps)
        if more > 0:
            self._stamps += [-1] * more
            self._children += [0] * more
        if len(self._leaves) > 2 * self.capacity_blocks + 1024:
            now = [entry for entry in self._leaves if self._stamps[entry[1]] == entry[0]]
            self._leaves = now
            heapify(now)

    def _drop_leaf(self, now: int) -> int:
        while True:
            stamp, node = heappop(self._leaves)
            if self._stamps[node] != stamp:
                continue
            self._stamps[node] = -1
            self._used_blocks -= 1
            parent = self._parents[node]
            self._children[parent] -= 1
            if parent != ROOT and self._children[parent] == 0 and self._stamps[parent] != now:
                heappush(self._leaves, (self._stamps[parent], parent))
            return node
