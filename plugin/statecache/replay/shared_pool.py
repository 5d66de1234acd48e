"""Replay on one pool of equal blocks that KV and states share.

Requests are served one after the other. A request computes its prompt in chunks of 16 blocks. Each
chunk leaves a running state of `state_blocks` blocks; the one before it is let go when the next
chunk starts. Where a state is to be kept, a chunk ends and the state's blocks get keys. In the end
one more block (the prompt's rest) and a state (to decode with) are taken; then all blocks are let
go: those without a key, the states, the KV from the prompt's end to its start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from statecache.errors import SettingsError
from statecache.index.admissions import POOL, find_admission

if TYPE_CHECKING:
    from statecache.replay.block_policies import BlockPolicyFactory

__all__ = ["MOST_BLOCKS", "BlockPool", "Points", "Served", "SharedPool"]

MOST_BLOCKS = 10_000_000  # of one pool: each takes memory here
_CHUNK_BLOCKS = 16
_BARE = 0


class Served(msgspec.Struct, frozen=True, gc=False):
    """What a lookup found, in blocks: `reached` of them have KV, a state is at `hit`."""

    blocks: int
    reached: int
    hit: int


class Points(msgspec.Struct, frozen=True):
    """Where states are kept besides the prompt's end.

    At each multiple of `every` blocks (None: nowhere), and with `branch_points` where the resident
    KV ends, if that is beyond the hit.
    """

    every: int | None
    branch_points: bool

    @classmethod
    def of(cls, admission: str, every_blocks: int) -> Points:
        """Return the points that the name of an admission means."""
        try:
            spec = find_admission(admission, POOL)
        except ValueError as error:
            raise SettingsError(str(error)) from error
        return cls(every_blocks if spec.at_intervals else None, spec.at_branch_points)

    def depths(self, found: Served) -> list[int]:
        """Return the depths beyond the hit, in blocks, shallowest first."""
        depths = {found.blocks}
        if self.every:
            first = (found.hit // self.every + 1) * self.every
            depths.update(range(first, found.blocks, self.every))
        if self.branch_points and found.reached > found.hit:
            depths.add(found.reached)
        return sorted(depths)


class BlockPool:
    """Blocks that are in use, or free and perhaps cached under a key.

    A key above 0 is the KV of that node of the prefix tree, one below 0 a part of a state. A key
    may have several blocks, in the order in which they got it.
    """

    def __init__(
        self,
        blocks: int,
        make_policy: BlockPolicyFactory,
        dropped_state: Callable[[int], None],
    ) -> None:
        self.cached: dict[int, list[int]] = {}
        self.uses = [0] * blocks
        self.keys = [_BARE] * blocks
        self.policy = make_policy(blocks, self.cached, self.uses)
        self._dropped_state = dropped_state

    def allocate(self, count: int, *, protected: bool) -> list[int]:
        """Take `count` free blocks; what they were cached under is forgotten."""
        taken = []
        for _ in range(count):
            block = self.policy.take()
            if self.keys[block]:
                self._forget(block)
            self.policy.computed(block, protected=protected)
            self.uses[block] = 1
            taken.append(block)
        return taken

    def cache(self, block: int, key: int) -> None:
        """Cache a block in use under `key`."""
        self.keys[block] = key
        self.cached.setdefault(key, []).append(block)

    def hit(self, key: int) -> int:
        """Use the first block cached under `key`."""
        block = self.cached[key][0]
        self.policy.hit(block)
        self.uses[block] += 1
        return block

    def free(self, blocks: Iterable[int]) -> None:
        """Let blocks go, the first one first to be handed out again."""
        uses, keys, policy = self.uses, self.keys, self.policy
        for block in blocks:
            uses[block] -= 1
            if uses[block] == 0:
                if keys[block]:
                    policy.give(block, keys[block])
                else:
                    policy.give_bare(block)

    def _forget(self, block: int) -> None:
        key = self.keys[block]
        self.keys[block] = _BARE
        same = self.cached[key]
        same.remove(block)
        if not same:
            del self.cached[key]
            if key > 0:
                self.policy.lost(block, key)
            else:
                self._dropped_state(key)


class SharedPool:
    """One pool, one block policy, one rule of which states are kept.

    Nodes are numbered from 1. `evicted_states` counts states that stopped being whole.
    """

    def __init__(
        self,
        pool_blocks: int,
        state_blocks: int,
        make_policy: BlockPolicyFactory,
        points: Points,
    ) -> None:
        for name, number in (("pool-blocks", pool_blocks), ("state-blocks", state_blocks)):
            if number < 1:
                raise SettingsError(f"{name} is {number}: give at least 1")
        self.evicted_states = 0
        self._pool_blocks = pool_blocks
        self._state_blocks = state_blocks
        self._points = points
        self._whole: set[int] = set()  # nodes whose state has all its parts
        self.pool = BlockPool(pool_blocks, make_policy, self._dropped_state)

    def serve(self, path: Sequence[int]) -> Served | None:
        """Look up, compute and let go; None if it cannot fit, which leaves all as it was.

        At the end of its last chunk a request holds its KV, its rest, and two states.
        """
        if len(path) + 1 + 2 * self._state_blocks > self._pool_blocks:
            return None
        found = self._look_up(path)
        kv = [self.pool.hit(node) for node in path[: found.hit]]
        states = []
        if found.hit:
            states.append([self.pool.hit(part) for part in self._parts(path[found.hit - 1])])
        self._compute(path, found, kv, states)
        return found

    def _look_up(self, path: Sequence[int]) -> Served:
        cached = self.pool.cached
        resident = next((i for i, node in enumerate(path) if node not in cached), len(path))
        self.pool.policy.looked_up(path[resident:])
        reached = min(resident, len(path) - 1)  # the last block is always computed
        whole = self._whole
        hit = next((i + 1 for i in range(reached - 1, -1, -1) if path[i] in whole), 0)
        return Served(len(path), reached, hit)

    def _compute(
        self, path: Sequence[int], found: Served, kv: list[int], states: list[list[int]]
    ) -> None:
        pool, parts = self.pool, self._state_blocks
        protected = found.hit > 0 and 4 * found.hit >= 3 * found.blocks
        at = found.hit
        for end, kept in self._chunks(found):
            self._let_go_all_but_the_last(states)
            fresh = pool.allocate(end - at, protected=protected)
            state = pool.allocate(parts, protected=protected)
            for block, node in zip(fresh, path[at:end], strict=True):
                pool.cache(block, node)
            if kept:
                self._whole.add(path[end - 1])
                for block, part in zip(state, self._parts(path[end - 1]), strict=True):
                    pool.cache(block, part)
            kv += fresh
            states.append(state)
            at = end
        self._let_go_all_but_the_last(states)
        pool.free(pool.allocate(1 + parts, protected=protected))
        pool.free(reversed(states[0]))
        pool.free(reversed(kv))

    def _chunks(self, found: Served) -> Iterable[tuple[int, bool]]:
        """Yield where each chunk ends, and whether its state is kept."""
        at = found.hit
        for kept in self._points.depths(found):
            while at < kept:
                at = min(at + _CHUNK_BLOCKS, kept)
                yield at, at == kept

    def _let_go_all_but_the_last(self, states: list[list[int]]) -> None:
        while len(states) > 1:
            self.pool.free(reversed(states.pop(0)))

    def _parts(self, node: int) -> range:
        """Return the keys of the parts of the state at `node`."""
        last = -(node + 1) * self._state_blocks
        return range(-node * self._state_blocks, last, -1)

    def _dropped_state(self, part: int) -> None:
        node = -part // self._state_blocks
        if node in self._whole:
            self._whole.remove(node)
            self.evicted_states += 1
