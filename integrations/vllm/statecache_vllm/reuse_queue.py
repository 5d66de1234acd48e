"""The order `reuse`: copies first, then what was never reused before what was.

vLLM 0.32 does not deduplicate: computing a missed region again leaves a second block with the same
hash, which can serve nothing the first one does not. Of the rest, blocks of requests that resumed
from at least 3/4 of their prompt ("proven") are likelier to be used again than fresh ones. Both
kinds have a list of their own, and the ratio of ages at which they are exchanged is learnt from
what is asked for after it was dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from statecache_vllm.block_queue import Block, BlockQueue, End, Key, link, unlink

__all__ = ["ReuseQueue"]

_NOWHERE, _FREE, _COPY, _PROVEN, _UNPROVEN = range(5)
# Ratios of ages (unproven to proven) at which a block of either kind goes.
_RATIOS = ((1, 1), (7, 5), (2, 1), (14, 5), (4, 1))
_LEARN_EVERY = 64


class ReuseQueue(BlockQueue):
    """Four lists: without a hash, copies, proven, unproven. Integers throughout.

    `is_kv(key)` says whether a key is one of the attention group that is watched to learn.
    """

    def __init__(
        self, copies: Callable[[Key], object], total: int, is_kv: Callable[[Key], bool]
    ) -> None:
        super().__init__(copies, total)
        self._is_kv = is_kv
        self._total = total
        self._ends = [End() for _ in range(5)]
        self._where = bytearray(total)
        self._stamp = [0] * total
        self.proven = bytearray(total)
        self.fresh_is_proven = 0
        self.clock = 0
        self.handed_out = 0
        self.ratio = 0
        self._used = [0, 0]  # dropped and asked for again: unproven, proven
        self._dropped = [0, 0]
        self.forget()

    def forget(self) -> None:
        """Drop what was remembered of hashes; what was learnt stays."""
        self._main: dict[Key, Block] = {}  # the free copy of a key that is not in the copies' list
        self._free_copies: dict[Key, int] = {}
        self._ghosts: dict[Key, tuple[int, int]] = {}
        self._where = bytearray(self._total)

    def looked_up(self, missing: Iterable[Key]) -> None:
        """A request was looked up for the first time; `missing` are its keys not in the cache."""
        self.clock += 1
        ghosts, oldest = self._ghosts, self.handed_out - self._total
        for key in missing:
            ghost = ghosts.pop(key, None)
            if ghost is not None and ghost[1] > oldest:
                self._used[ghost[0]] += 1
        if self.clock % _LEARN_EVERY == 0:
            self._learn()

    def _learn(self) -> None:
        used, used_proven = self._used
        dropped, dropped_proven = self._dropped
        if used + used_proven:
            if not dropped_proven:
                step = -1
            elif not dropped:
                step = 1
            else:
                gain, loss = used_proven * dropped, used * dropped_proven
                step = (gain > loss) - (gain < loss)
            self.ratio = min(max(self.ratio + step, 0), len(_RATIOS) - 1)
        self._used = [used // 2, used_proven // 2]
        self._dropped = [dropped // 2, dropped_proven // 2]

    def _take(self) -> Block:
        _, free, copies, proven, unproven = self._ends
        block = free.next_free_block
        if block is free:
            block = copies.next_free_block
            if block is copies:
                block = self._older(proven, unproven)
        last, following = block.prev_free_block, block.next_free_block
        last.next_free_block = following
        following.prev_free_block = last
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1
        self.handed_out += 1
        index = block.block_id
        key = self._keys[index]
        if key is not None:
            self._dropping(block, key)
        self._where[index] = _NOWHERE
        self.proven[index] = self.fresh_is_proven
        return block

    def _older(self, proven: End, unproven: End) -> Block:
        old, new = proven.next_free_block, unproven.next_free_block
        if old is proven:
            if new is unproven:
                raise ValueError("no free blocks")
            return new
        if new is unproven:
            return old
        more, less = _RATIOS[self.ratio]
        now, stamp = self.clock + 1, self._stamp
        new_age, old_age = now - stamp[new.block_id], now - stamp[old.block_id]
        return new if more * new_age >= less * old_age else old

    def _dropping(self, block: Block, key: Key) -> None:
        where = self._where[block.block_id]
        self._leave(where, key)
        if not self._is_last(key, block):
            return
        if where >= _PROVEN and self._is_kv(key):
            kind = self.proven[block.block_id]
            ghosts = self._ghosts
            ghosts.pop(key, None)
            ghosts[key] = (kind, self.handed_out)
            self._dropped[kind] += 1
            oldest = next(iter(ghosts))
            if ghosts[oldest][1] <= self.handed_out - self._total:
                del ghosts[oldest]
        if self.lost is not None:
            self.lost(key)

    def _leave(self, where: int, key: Key) -> None:
        if where >= _PROVEN:
            del self._main[key]
        elif where == _COPY:
            left = self._free_copies[key] - 1
            if left:
                self._free_copies[key] = left
            else:
                del self._free_copies[key]

    def remove(self, block: Block) -> None:
        """A free block was hit: it is proven."""
        unlink(block)
        self.num_free_blocks -= 1
        index = block.block_id
        key = self._keys[index]
        if key is not None:
            self._leave(self._where[index], key)
        self._where[index] = _NOWHERE
        self.proven[index] = 1

    def append_n(self, blocks: Iterable[Block]) -> None:
        """Take blocks back, each into the list it belongs to."""
        keys, where, stamp, main = self._keys, self._where, self._stamp, self._main
        ends, clock, apart, copies = self._ends, self.clock, self.apart, self._copies
        for block in blocks:
            index = block.block_id
            key = keys[index] = block.block_hash
            if key is None or (apart and key in apart):
                place = _FREE
            else:
                stamp[index] = clock
                place = _UNPROVEN - self.proven[index]
                if copies(key) is not block:
                    place = self._place_of_copy(key, place)
                if place != _COPY:
                    main[key] = block
            where[index] = place
            end = ends[place]
            last = end.prev_free_block
            last.next_free_block = block
            block.prev_free_block = last
            block.next_free_block = end
            end.prev_free_block = block
            self.num_free_blocks += 1

    def _place_of_copy(self, key: Key, place: int) -> int:
        """Return the list of a block whose key has other copies: the last one freed stays."""
        found = self._copies(key)
        if not isinstance(found, dict):
            return place
        main = self._main.get(key)
        in_use = len(found) - 1 - self._free_copies.get(key, 0) - (main is not None)
        if in_use > 0:
            self._count_copy(key)
            return _COPY
        if main is not None:
            del self._main[key]
            unlink(main)
            link(self._ends[_COPY], main)
            self._where[main.block_id] = _COPY
            self._count_copy(key)
        return place

    def _count_copy(self, key: Key) -> None:
        self._free_copies[key] = self._free_copies.get(key, 0) + 1

    def prepend_n(self, blocks: Sequence[Block]) -> None:
        """Put blocks without a hash at the head, first one first."""
        first = self._ends[_FREE].next_free_block
        for block in blocks:
            index = block.block_id
            self._keys[index] = None
            self._where[index] = _FREE
            link(first, block)
        self.num_free_blocks += len(blocks)

    def unhashed(self, block: Block) -> None:
        """A free block lost its hash: it goes with those that have none."""
        index = block.block_id
        key, where = self._keys[index], self._where[index]
        if where == _NOWHERE or key is None:
            return
        self._leave(where, key)
        self._keys[index] = None
        if where != _FREE:
            unlink(block)
            link(self._ends[_FREE], block)
            self._where[index] = _FREE

    def _lists(self) -> Sequence[End]:
        return self._ends[1:]
