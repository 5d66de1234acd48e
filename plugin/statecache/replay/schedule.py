"""What a trace fixes before any policy decides: paths, resident KV, and where states may be set.

KV residency does not depend on states, so one plan serves every policy and slot count.
"""

from __future__ import annotations

from bisect import bisect_right
from heapq import heapify, heappop, heappush
from itertools import compress
from typing import TYPE_CHECKING

import msgspec

from statecache.errors import SettingsError
from statecache.trace.format import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statecache.trace.format import Trace

__all__ = [
    "ADMISSIONS",
    "KvPool",
    "KvTimeline",
    "Plan",
    "PrefixTree",
    "Step",
    "admitted_blocks",
    "kv_timeline",
    "make_plan",
]

ADMISSIONS = ("dense", "ends", "aligned")
_ROOT = 0


class PrefixTree(msgspec.Struct, frozen=True):
    """All prompts of a trace as one tree of blocks; node 0 is the root, parents come first.

    `paths[r]` lists the nodes of request r from its first block to its last; `known[r]` says how
    many of them an earlier request had.
    """

    parents: list[int]
    paths: list[list[int]]
    known: list[int]

    @classmethod
    def of(cls, trace: Trace) -> PrefixTree:
        """Build the tree: O(blocks)."""
        parents = [-1]
        paths: list[list[int]] = []
        known: list[int] = []
        node_of: dict[tuple[int, int], int] = {}
        for request in trace.requests:
            before = len(parents)
            node = _ROOT
            path: list[int] = []
            for block in request.hash_ids[: request.blocks]:
                child = node_of.setdefault((node, block), len(parents))
                if child == len(parents):
                    parents.append(node)
                path.append(child)
                node = child
            paths.append(path)
            known.append(len(path) - (len(parents) - before))
        return cls(parents, paths, known)


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

    @property
    def used_blocks(self) -> int:
        """How many nodes are resident."""
        return self._used_blocks

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
            if parent != _ROOT and self._children[parent] == 0 and self._stamps[parent] != now:
                heappush(self._leaves, (self._stamps[parent], parent))
            return node


class Step(msgspec.Struct, frozen=True):
    """One request, in candidates: nodes where some request may set a state.

    Candidates are numbered in preorder, so along a path their numbers rise with depth.
    `path` are all those of its prompt, shallowest first; `resumable` the first of them, where a hit
    may be found, deepest first; `admitted` those this request sets beyond its hit, shallowest
    first; `dropped` those whose KV goes to make room for it.
    """

    prompt_tokens: int
    resident_tokens: int
    path: list[int]
    resumable: list[int]
    admitted: list[int]
    dropped: list[int]


class Plan(msgspec.Struct, frozen=True):
    """A trace ready to replay. `last[c]` is the highest candidate in the subtree of candidate c."""

    admission: str
    rejected: int
    depths: list[int]
    last: list[int]
    steps: list[Step]


def make_plan(tree: PrefixTree, kv: KvTimeline, admission: str, chunk_tokens: int = 8192) -> Plan:
    """Place the candidates: multiples of `chunk_tokens` and the prompt's end, or ends alone.

    With `aligned` a request sets one state, at the last multiple of `chunk_tokens` in its prompt.
    """
    if admission not in ADMISSIONS:
        raise SettingsError(f"unknown admission {admission!r}: use {', '.join(ADMISSIONS)}")
    if chunk_tokens < BLOCK_TOKENS or chunk_tokens % BLOCK_TOKENS:
        raise SettingsError(f"chunk is {chunk_tokens}: give a multiple of {BLOCK_TOKENS} tokens")
    every = chunk_tokens // BLOCK_TOKENS
    served = [r for r, resident in enumerate(kv.resident) if resident >= 0]
    admitted = {r: admitted_blocks(len(tree.paths[r]), admission, every) for r in served}
    candidates, paths, depths, last = _number_candidates(tree, admitted)
    steps = []
    for r in served:
        blocks = len(tree.paths[r])
        resident_tokens = min(kv.resident[r], blocks - 1) * BLOCK_TOKENS
        reached = bisect_right(paths[r], resident_tokens, key=depths.__getitem__)
        steps.append(
            Step(
                prompt_tokens=blocks * BLOCK_TOKENS,
                resident_tokens=resident_tokens,
                path=paths[r],
                resumable=paths[r][:reached][::-1],
                admitted=[candidates[tree.paths[r][b - 1]] for b in admitted[r]],
                dropped=[c for node in kv.dropped[r] if (c := candidates[node]) >= 0],
            )
        )
    return Plan(admission, len(tree.paths) - len(served), depths, last, steps)


def admitted_blocks(blocks: int, admission: str, every: int) -> list[int]:
    """Return after how many blocks of its prompt a request sets states, in ascending order."""
    if admission == "ends":
        return [blocks]
    if admission == "aligned":
        return [blocks // every * every] if blocks >= every else []
    return [*range(every, blocks, every), blocks]


def _number_candidates(
    tree: PrefixTree, admitted_by: dict[int, list[int]]
) -> tuple[list[int], dict[int, list[int]], list[int], list[int]]:
    """Return each node's candidate (or -1), each path's candidates, `depths` and `last`."""
    depth_of, above_of, chains = _chain_candidates(tree, admitted_by)
    order = sorted(depth_of)  # a node's number is above its parent's
    in_subtree = dict.fromkeys([_ROOT, *order], 1)
    for node in reversed(order):
        in_subtree[above_of[node]] += in_subtree[node]
    candidates = [-1] * len(tree.parents)
    following = {_ROOT: 0}  # the number that the next candidate below a node gets
    depths = [0] * len(order)
    last = [0] * len(order)
    for node in order:
        number = following[above_of[node]]
        following[above_of[node]] += in_subtree[node]
        following[node] = number + 1
        candidates[node] = number
        depths[number] = depth_of[node]
        last[number] = number + in_subtree[node] - 1
    numbered = {r: [candidates[node] for node in chain] for r, chain in chains.items()}
    return candidates, numbered, depths, last


def _chain_candidates(
    tree: PrefixTree, admitted_by: dict[int, list[int]]
) -> tuple[dict[int, int], dict[int, int], dict[int, list[int]]]:
    """Return the depth of each candidate node, the one above it, and those of each path."""
    is_candidate = bytearray(len(tree.parents))
    for r, admitted in admitted_by.items():
        path = tree.paths[r]
        for blocks in admitted:
            is_candidate[path[blocks - 1]] = 1
    depth_of: dict[int, int] = {}
    above_of: dict[int, int] = {}
    chains: dict[int, list[int]] = {}
    for r in admitted_by:
        path = tree.paths[r]
        flags = [is_candidate[node] for node in path]
        chains[r] = list(compress(path, flags))
        if not chains[r] or chains[r][-1] in depth_of:
            continue
        blocks_deep = compress(range(1, len(path) + 1), flags)
        for above, node, blocks in zip([_ROOT, *chains[r]], chains[r], blocks_deep, strict=False):
            depth_of[node] = blocks * BLOCK_TOKENS
            above_of[node] = above
    return depth_of, above_of, chains
