"""All prompts of a trace as one tree of blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from statecache.trace.format import Trace

__all__ = ["ROOT", "PrefixTree", "PreorderTree", "directly_below"]

ROOT = 0


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
            node = ROOT
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


class PreorderTree(msgspec.Struct, frozen=True):
    """A prefix tree whose nodes are numbered in preorder: node v's subtree is v .. last[v]."""

    parents: list[int]
    last: list[int]
    paths: list[list[int]]

    @classmethod
    def of(cls, tree: PrefixTree) -> PreorderTree:
        """Renumber the nodes; the root stays 0. O(blocks)."""
        nodes = len(tree.parents)
        subtree = [1] * nodes
        for node in range(nodes - 1, 0, -1):
            subtree[tree.parents[node]] += subtree[node]
        number = [0] * nodes
        following = [1] * nodes  # by old number: what the next child gets
        for node in range(1, nodes):
            parent = tree.parents[node]
            number[node] = following[parent]
            following[parent] += subtree[node]
            following[node] = number[node] + 1
        parents, last = [-1] * nodes, [nodes - 1] * nodes
        for node in range(1, nodes):
            parents[number[node]] = number[tree.parents[node]]
            last[number[node]] = number[node] + subtree[node] - 1
        return cls(parents, last, [[number[node] for node in path] for path in tree.paths])


def directly_below(candidate: int, last: list[int], resident: bytearray) -> list[int]:
    """Return the resident states below `candidate` with no other resident one in between.

    Numbers are in preorder: `last[c]` is the highest in the subtree of c.
    """
    end = last[candidate] + 1
    found = []
    below = resident.find(1, candidate + 1, end)
    while below >= 0:
        found.append(below)
        below = resident.find(1, last[below] + 1, end)
    return found
