"""Replay on two pools: blocks for KV alone, and beside them slots for states.

This is what a shared pool becomes when states get slots of their own. States are evicted as
`StateIndex` decides; KV goes leaf by leaf, what no state makes usable first. Requests are served
one after the other; running states are not counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from statecache.errors import SettingsError
from statecache.replay.prefix_tree import directly_below
from statecache.replay.shared_pool import Points, Served
from statecache.trace.format import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statecache.index.interface import EvictionIndex
    from statecache.replay.leaf_kv import LeafLruKv
    from statecache.replay.prefix_tree import PreorderTree
    from statecache.replay.weighted_gds import WeightedGds

__all__ = ["SplitPool", "States"]

States: TypeAlias = "EvictionIndex | WeightedGds"


class SplitPool:
    """KV blocks and state slots, each bounded; nodes are those of `tree`."""

    def __init__(
        self, tree: PreorderTree, kv: LeafLruKv, slots: int, states: States, points: Points
    ) -> None:
        if slots < 1:
            raise SettingsError(f"checkpoint-slots is {slots}: give at least 1")
        self.evicted_states = 0
        self._last = tree.last
        self._kv = kv
        self._slots = slots
        self._states = states
        self._points = points
        self._resident = bytearray(len(tree.parents))  # states
        self._was_hit = bytearray(len(tree.parents))

    def serve(self, path: Sequence[int]) -> Served | None:
        """Look up and set; None if the KV cannot fit, which leaves all as it was."""
        if len(path) > self._kv.capacity_blocks:
            return None
        has_kv = self._kv.resident_prefix(path)
        reached = min(has_kv, len(path) - 1)  # the last block is always computed
        hit = next((i + 1 for i in range(reached - 1, -1, -1) if self._resident[path[i]]), 0)
        found = Served(len(path), reached, hit)
        hit_node = path[hit - 1] if hit else None
        self._kv.start(path, has_kv)
        if hit_node is not None:
            self._was_hit[hit_node] = 1
            self._states.touch(hit_node)
            self._states.pin(hit_node)
            self._kv.use_state(hit_node, protected=True)
        for node in self._kv.insert(path, has_kv):
            self._resident[node] = 0
            self._states.erase(node)
        self._set_states(path, found)
        if hit_node is not None:
            self._states.unpin(hit_node)
            self._kv.use_state(hit_node, protected=True)
        return found

    def _set_states(self, path: Sequence[int], found: Served) -> None:
        protected = found.hit > 0 and 4 * found.hit >= 3 * found.blocks
        resident = self._resident
        on_path = [path[found.hit - 1]] if found.hit else []  # states of this path, deepest last
        for depth in self._points.depths(found):
            node = path[depth - 1]
            if resident[node]:
                self._states.touch(node)
                self._kv.use_state(node)
                continue
            if len(self._states) >= self._slots and not self._evict():
                continue
            while on_path and not resident[on_path[-1]]:
                on_path.pop()
            self._states.insert(
                node,
                depth * BLOCK_TOKENS,
                on_path[-1] if on_path else None,
                directly_below(node, self._last, resident) if self._last[node] > node else (),
            )
            resident[node] = 1
            self._kv.use_state(node, protected=protected or bool(self._was_hit[node]))
            on_path.append(node)

    def _evict(self) -> bool:
        victims = self._states.evict(1)
        for node in victims:
            self._resident[node] = 0
            self._kv.drop_state(node)
            self.evicted_states += 1
        return bool(victims)
