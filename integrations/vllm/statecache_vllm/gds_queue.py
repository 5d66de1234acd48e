"""The order `gds`, for comparison: states by what rebuilding costs, KV by last use.

In one pool of equal blocks this gains little over plain LRU (a state is worth what its KV is worth,
and both are freed together), which is why `reuse` is the default. A state is one block in each
recurrent group: they are evicted together, since one without the others serves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from statecache.settings import Settings
from statecache_vllm.block_queue import Block, BlockQueue, End, Key, link, unlink
from statecache_vllm.state_tree import Hash, StateTree

__all__ = ["GdsQueue"]


class GdsQueue(BlockQueue):
    """Blocks without a hash first; then the cheapest state or the oldest KV, whichever is older.

    `state_of(key)` returns the group and block hash of a state's key, None for any other key. A
    state that `committed` was never told of is treated like KV. O(log states) a block.
    """

    def __init__(
        self,
        copies: Callable[[Key], object],
        total: int,
        settings: Settings,
        block_tokens: int,
        groups: int,
        state_of: Callable[[Key], tuple[int, Hash] | None],
    ) -> None:
        super().__init__(copies, total)
        self.tree = StateTree(settings, block_tokens)
        self._groups = groups
        self._state_of = state_of
        self._free, self._kv, self._states = End(), End(), End()
        self._stamp = [0] * total
        self._clock = 0
        self.forget()

    def forget(self) -> None:
        """Drop every state."""
        self.tree.clear()
        self._blocks: dict[Hash, dict[int, dict[int, Block]]] = {}  # free blocks, by group
        self._used: dict[Hash, int] = {}

    def committed(self, path: Sequence[Hash]) -> None:
        """A state was set at the end of `path`; a request still holds it."""
        known = self.tree.find(path[-1])
        state = self.tree.put(path)
        if known is None:
            self.tree.pin(state)

    def _take(self) -> Block:
        block = self._free.next_free_block
        if block is self._free:
            block = self._kv.next_free_block
            victim = self.tree.peek()
            oldest = None if block is self._kv else self._stamp[block.block_id]
            if victim is not None:
                own = self.tree.hash_of(victim)
                if oldest is None or self._used[own] < oldest:
                    self.tree.evict()
                    block = self._release(own)
            elif oldest is None:
                block = self._any_state_block()
        unlink(block)
        self.num_free_blocks -= 1
        key = self._keys[block.block_id]
        if key is not None and self.lost is not None and self._is_last(key, block):
            self.lost(key)
        return block

    def _release(self, own: Hash) -> Block:
        """Move the free blocks of an evicted state to those that go first; return the first."""
        self._used.pop(own, None)
        for blocks in self._blocks.pop(own, {}).values():
            for block in blocks.values():
                unlink(block)
                link(self._free, block)
        return self._free.next_free_block

    def _any_state_block(self) -> Block:
        """Return a free block of a state that is in use: no other block is left."""
        block = self._states.next_free_block
        if block is self._states:
            raise ValueError("no free blocks")
        return self._drop(block)

    def _drop(self, block: Block) -> Block:
        """The state of a queued block is useless from now on: its blocks go first."""
        found = self._state_of(self._keys[block.block_id] or b"")
        if found is not None:
            state = self.tree.find(found[1])
            if state is not None:
                self.tree.erase(state)
            self._release(found[1])
        return block

    def remove(self, block: Block) -> None:
        """A free block was hit: its state, if it is one, is held."""
        unlink(block)
        self.num_free_blocks -= 1
        found = self._state_of(self._keys[block.block_id] or b"")
        if found is None or found[1] not in self._blocks:
            return
        group, own = found
        by_group = self._blocks[own]
        complete = len(by_group) == self._groups
        blocks = by_group.get(group, {})
        if blocks.pop(block.block_id, None) is None:
            return
        if not blocks:
            del by_group[group]
            if complete:
                state = self.tree.find(own)
                if state is not None:
                    self.tree.pin(state)
        if not by_group:
            del self._blocks[own]

    def append_n(self, blocks: Iterable[Block]) -> None:
        """Take blocks back: a state is free once a block of each of its groups is."""
        for block in blocks:
            self._clock += 1
            self._stamp[block.block_id] = self._clock
            key = self._keys[block.block_id] = block.block_hash
            self.num_free_blocks += 1
            if key is None:
                link(self._free, block)
                continue
            found = self._state_of(key)
            state = None if found is None else self.tree.find(found[1])
            if found is None or state is None:
                link(self._kv, block)
                continue
            link(self._states, block)
            group, own = found
            by_group = self._blocks.setdefault(own, {})
            missing = group not in by_group
            by_group.setdefault(group, {})[block.block_id] = block
            self._used[own] = self._clock
            if missing and len(by_group) == self._groups:
                self.tree.unpin(state)

    def prepend_n(self, blocks: Sequence[Block]) -> None:
        """Put blocks without a hash at the head, first one first."""
        first = self._free.next_free_block
        for block in blocks:
            self._keys[block.block_id] = None
            link(first, block)
        self.num_free_blocks += len(blocks)

    def unhashed(self, block: Block) -> None:
        """A free block lost its hash: it goes first, and its state with it."""
        if block.prev_free_block is None or self._keys[block.block_id] is None:
            return
        self._drop(block)
        self._keys[block.block_id] = None
        unlink(block)
        link(self._free, block)

    def _lists(self) -> Sequence[End]:
        return (self._free, self._kv, self._states)
