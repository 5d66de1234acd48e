"""The order `reuse`: copies first, then what was never reused before what was.

vLLM 0.32 does not deduplicate: computing a missed region again leaves a second block with the same
hash, which can serve nothing the first one does not. Of the rest, blocks of requests that resumed
from at least 3/4 of their prompt ("proven") are likelier to be used again than fresh ones. Both
kinds have a list of their own, and the ratio of ages at which they are exchanged is learnt from
what is asked for after it was dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile

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
        # Of keys that had several copies: the free one that is not in the copies' list, and how
        # many are in it. vLLM keeps a dict for such a key until its last copy has gone.
        self._main: dict[Key, Block] = {}
        self._free_copies: dict[Key, int] = {}
        self._ghosts: dict[Key, int] = {}  # 2 * when it was dropped + whether it was proven
        self._where = bytearray(self._total)

    def looked_up(self, missing: Iterable[Key]) -> None:
        """A request was looked up for the first time; `missing` are its keys not in the cache."""
        self.clock += 1
        ghosts = self._ghosts
        if ghosts:
            oldest = self.handed_out - self._total
            for key in missing:
                ghost = ghosts.pop(key, None)
                if ghost is not None and ghost >> 1 > oldest:
                    self._used[ghost & 1] += 1
        if self.clock % _LEARN_EVERY == 0:
            self._learn()
            self._forget_old_ghosts()

    def _forget_old_ghosts(self) -> None:
        """Drop what no lookup can count any more: ghosts are in the order they were dropped in."""
        oldest = self.handed_out - self._total
        old = list(takewhile(lambda key: self._ghosts[key] >> 1 <= oldest, self._ghosts))
        for key in old:
            del self._ghosts[key]

    @property
    def watches(self) -> bool:
        """Whether anything was dropped that a lookup could ask for."""
        return bool(self._ghosts)

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

    def popleft_n(self, n: int) -> list[Block]:
        """Hand out `n` blocks: those without a hash, then copies, then the older kind."""
        if n > self.num_free_blocks:
            raise ValueError(f"{n} blocks asked for, {self.num_free_blocks} are free")
        _, free, copies, proven, unproven = self._ends
        keys, where, marks, fresh = self._keys, self._where, self.proven, self.fresh_is_proven
        cached, lost, going = self._copies, self.lost, self._going
        taken = []
        for _ in range(n):
            block = free.next_free_block
            if block is free:
                block = copies.next_free_block
                if block is copies:
                    block = self._older(proven, unproven)
            last, following = block.prev_free_block, block.next_free_block
            last.next_free_block = following
            following.prev_free_block = last
            block.prev_free_block = block.next_free_block = None
            self.handed_out += 1
            index = block.block_id
            key = keys[index]
            if key is not None:
                if cached(key) is not block:
                    self._drop_copy(block, key)
                else:
                    if where[index] >= _PROVEN and self._is_kv(key):
                        self._ghosts[key] = 2 * self.handed_out + marks[index]
                        self._dropped[marks[index]] += 1
                    if lost is not None:
                        lost(key)
            where[index] = _NOWHERE
            marks[index] = fresh
            taken.append(block)
        self.num_free_blocks -= n
        if going:
            going.clear()
        return taken

    def popleft(self) -> Block:
        """Hand out one block; `ValueError` when none is free."""
        if not self.num_free_blocks:
            raise ValueError("no free blocks")
        return self.popleft_n(1)[0]

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

    def _drop_copy(self, block: Block, key: Key) -> None:
        """A block goes whose key has, or had, other copies."""
        index = block.block_id
        where = self._where[index]
        self._leave(where, key)
        if not self._is_last(key, block):
            return
        if where >= _PROVEN and self._is_kv(key):
            self._ghosts.pop(key, None)
            self._ghosts[key] = 2 * self.handed_out + self.proven[index]
            self._dropped[self.proven[index]] += 1
        if self.lost is not None:
            self.lost(key)

    def _leave(self, where: int, key: Key) -> None:
        if where >= _PROVEN:
            self._main.pop(key, None)
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
        if self._main or self._free_copies:
            key = self._keys[index]
            if key is not None:
                self._leave(self._where[index], key)
        self._where[index] = _NOWHERE
        self.proven[index] = 1

    def append_n(self, blocks: Iterable[Block]) -> None:
        """Take blocks back, each into the list it belongs to."""
        keys, where, stamp, proven = self._keys, self._where, self._stamp, self.proven
        ends, clock, apart, copies = self._ends, self.clock, self.apart, self._copies
        count = 0
        for block in blocks:
            count += 1
            index = block.block_id
            key = keys[index] = block.block_hash
            if key is None or (apart and key in apart):
                place = _FREE
            else:
                stamp[index] = clock
                place = _UNPROVEN - proven[index]
                if copies(key) is not block:
                    place = self._place_of_copy(block, key, place)
            where[index] = place
            end = ends[place]
            last = end.prev_free_block
            last.next_free_block = block
            block.prev_free_block = last
            block.next_free_block = end
            end.prev_free_block = block
        self.num_free_blocks += count

    def _place_of_copy(self, block: Block, key: Key, place: int) -> int:
        """Return the list of a block whose key has other copies: the last one freed stays."""
        found = self._copies(key)
        if not isinstance(found, dict):
            return place
        main = self._main.get(key)
        if main is None:
            # The only copy of a key is not kept in `_main`; vLLM's dict begins with it.
            first = next(iter(found.values()))
            if first is not block and self._where[first.block_id] >= _PROVEN:
                main = self._main[key] = first
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
        self._main[key] = block
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
