"""What a trace fixes before any policy decides: paths, resident KV, and where states may be set.

One schedule serves every policy and slot count.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import compress
from typing import TYPE_CHECKING

import msgspec

from statecache.errors import SettingsError
from statecache.index.admissions import SLOTS, find_admission
from statecache.replay.prefix_tree import ROOT, PrefixTree
from statecache.trace.format import BLOCK_TOKENS

if TYPE_CHECKING:
    from statecache.replay.kv_residency import KvTimeline

__all__ = [
    "ReplaySchedule",
    "ScheduledRequest",
    "admitted_blocks",
    "make_schedule",
]


class ScheduledRequest(msgspec.Struct, frozen=True):
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


class ReplaySchedule(msgspec.Struct, frozen=True):
    """A trace ready to replay. `last[c]` is the highest candidate in the subtree of candidate c."""

    admission: str
    rejected: int
    depths: list[int]
    last: list[int]
    requests: list[ScheduledRequest]


def make_schedule(
    tree: PrefixTree, kv: KvTimeline, admission: str, chunk_tokens: int = 8192
) -> ReplaySchedule:
    """Place the candidates: multiples of `chunk_tokens` and the prompt's end, or ends alone.

    With `aligned` a request sets one state, at the last multiple of `chunk_tokens` in its prompt.
    """
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
            ScheduledRequest(
                prompt_tokens=blocks * BLOCK_TOKENS,
                resident_tokens=resident_tokens,
                path=paths[r],
                resumable=paths[r][:reached][::-1],
                admitted=[candidates[tree.paths[r][b - 1]] for b in admitted[r]],
                dropped=[c for node in kv.dropped[r] if (c := candidates[node]) >= 0],
            )
        )
    return ReplaySchedule(admission, len(tree.paths) - len(served), depths, last, steps)


def admitted_blocks(blocks: int, admission: str, every: int) -> list[int]:
    """Return after how many blocks of its prompt a request sets states, in ascending order."""
    try:
        spec = find_admission(admission, SLOTS)
    except ValueError as error:
        raise SettingsError(str(error)) from error
    if not spec.at_prompt_end:
        return [blocks // every * every] if blocks >= every else []
    return [*range(every, blocks, every), blocks] if spec.at_intervals else [blocks]


def _number_candidates(
    tree: PrefixTree, admitted_by: dict[int, list[int]]
) -> tuple[list[int], dict[int, list[int]], list[int], list[int]]:
    """Return each node's candidate (or -1), each path's candidates, `depths` and `last`."""
    depth_of, above_of, chains = _chain_candidates(tree, admitted_by)
    order = sorted(depth_of)  # a node's number is above its parent's
    in_subtree = dict.fromkeys([ROOT, *order], 1)
    for node in reversed(order):
        in_subtree[above_of[node]] += in_subtree[node]
    candidates = [-1] * len(tree.parents)
    following = {ROOT: 0}  # the number that the next candidate below a node gets
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
        for above, node, blocks in zip([ROOT, *chains[r]], chains[r], blocks_deep, strict=False):
            depth_of[node] = blocks * BLOCK_TOKENS
            above_of[node] = above
    return depth_of, above_of, chains
