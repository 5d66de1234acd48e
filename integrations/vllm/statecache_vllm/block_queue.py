"""The free queue of a block pool, in the place of vLLM's: shared parts and vLLM's own order.

A queue holds every block that no request uses. A block with a hash is still cached: it can be hit
and taken back (`remove`) until it is handed out (`popleft`). Blocks are vLLM's; the two links they
carry for their place in the queue are used as vLLM uses them. Every method is O(1) a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

__all__ = ["BlockQueue", "End", "StockQueue"]

Block = Any
Key = bytes


class End:
    """Both ends of a circular list of blocks."""

    __slots__ = ("block_id", "next_free_block", "prev_free_block")

    def __init__(self) -> None:
        self.block_id = -1
        self.clear()

    def clear(self) -> None:
        """Forget every block."""
        self.next_free_block: Any = self
        self.prev_free_block: Any = self

    def __iter__(self) -> Iterator[Block]:
        block = self.next_free_block
        while block is not self:
            following = block.next_free_block
            yield block
            block = following


def link(before: Any, block: Block) -> None:
    """Put `block` in front of `before`."""
    last = before.prev_free_block
    last.next_free_block = block
    block.prev_free_block = last
    block.next_free_block = before
    before.prev_free_block = block


def unlink(block: Block) -> None:
    """Take `block` out of its list."""
    last, following = block.prev_free_block, block.next_free_block
    if last is None:
        raise RuntimeError(f"block {block.block_id} is not in the free queue")
    last.next_free_block = following
    following.prev_free_block = last
    block.prev_free_block = block.next_free_block = None


class BlockQueue:
    """What every order shares: counts, and what is told when a hash has left the cache.

    `copies(key)` returns the block cached under a key, or a dict of several, or None: vLLM keeps
    all copies of a hash. `lost(key)` is told each key whose last copy is handed out. Blocks whose
    key is in `apart` are kept elsewhere too, so they go before any other cached block.
    """

    def __init__(self, copies: Callable[[Key], Any], total: int) -> None:
        self.num_free_blocks = 0
        self.lost: Callable[[Key], None] | None = None
        self.apart: dict[Key, Any] = {}
        self._copies = copies
        self._keys: list[Key | None] = [None] * total
        self._going: dict[Key, int] = {}  # copies handed out in this call, whose hash still stands

    def fill(self, blocks: Sequence[Block]) -> None:
        """Take over the free blocks of a pool, first one first."""
        for block in blocks:
            block.prev_free_block = block.next_free_block = None
        self.append_n(blocks)

    def popleft_n(self, n: int) -> list[Block]:
        """Hand out `n` blocks."""
        if n > self.num_free_blocks:
            raise ValueError(f"{n} blocks asked for, {self.num_free_blocks} are free")
        take = self._take
        taken = [take() for _ in range(n)]
        self._going.clear()
        return taken

    def popleft(self) -> Block:
        """Hand out one block; `ValueError` when none is free."""
        block = self._take()
        self._going.clear()
        return block

    def append(self, block: Block) -> None:
        """Take one block back."""
        self.append_n((block,))

    def get_all_free_blocks(self) -> list[Block]:
        """Return every free block, roughly in the order in which they would go."""
        return [block for end in self._lists() for block in end]

    def iter_blocks_after(self, cursor: Block | None) -> Iterator[Block]:
        """As `get_all_free_blocks`, from behind `cursor` on."""
        blocks = self.get_all_free_blocks()
        return iter(blocks if cursor is None else blocks[blocks.index(cursor) + 1 :])

    def remove(self, block: Block) -> None:
        """A free block was hit and is in use again."""
        raise NotImplementedError

    def append_n(self, blocks: Iterable[Block]) -> None:
        """Take blocks back, in the order in which they should go."""
        raise NotImplementedError

    def prepend_n(self, blocks: Sequence[Block]) -> None:
        """Take back blocks without a hash: they go first."""
        raise NotImplementedError

    def unhashed(self, block: Block) -> None:
        """The hash of a block was cleared while it was free (`BlockPool.evict_blocks`)."""
        raise NotImplementedError

    def reset(self, copies: Callable[[Key], Any]) -> None:
        """All hashes were cleared (`BlockPool.reset_prefix_cache`): every block is free."""
        blocks = self.get_all_free_blocks()
        for end in self._lists():
            end.clear()
        self._copies = copies
        self.num_free_blocks = 0
        self.forget()
        self._keys = [None] * len(self._keys)
        self.fill(blocks)

    def forget(self) -> None:
        """Drop what an order remembers of hashes."""

    def _lists(self) -> Sequence[End]:
        raise NotImplementedError

    def _take(self) -> Block:
        raise NotImplementedError

    def _is_last(self, key: Key, block: Block) -> bool:
        """Whether `block`, which is handed out now, is the last one cached under `key`.

        `BlockPool.get_new_blocks` of vLLM 0.32 takes all blocks before it clears their hashes.
        """
        found = self._copies(key)
        if not isinstance(found, dict):
            return found is block
        before = self._going.get(key, 0)
        self._going[key] = before + 1
        return len(found) - before == 1


class StockQueue(BlockQueue):
    """vLLM's order (`FreeKVCacheBlockQueue` of 0.32): one list, first in, first out."""

    def __init__(self, copies: Callable[[Key], Any], total: int) -> None:
        super().__init__(copies, total)
        self._end = End()

    def popleft_n(self, n: int) -> list[Block]:
        """Hand out the first `n` blocks."""
        if n > self.num_free_blocks:
            raise ValueError(f"{n} blocks asked for, {self.num_free_blocks} are free")
        block, taken = self._end.next_free_block, []
        for _ in range(n):
            taken.append(block)
            following = block.next_free_block
            block.prev_free_block = block.next_free_block = None
            block = following
        self._end.next_free_block = block
        block.prev_free_block = self._end
        self.num_free_blocks -= n
        if self.lost is not None:
            self._tell(taken, self.lost)
        return taken

    def _tell(self, taken: Sequence[Block], lost: Callable[[Key], None]) -> None:
        for block in taken:
            key = self._keys[block.block_id]
            if key is not None and self._is_last(key, block):
                lost(key)
        self._going.clear()

    def popleft(self) -> Block:
        """Hand out the first block; `ValueError` when none is free."""
        if not self.num_free_blocks:
            raise ValueError("no free blocks")
        return self.popleft_n(1)[0]

    def remove(self, block: Block) -> None:
        """Unlink a block that was hit."""
        unlink(block)
        self.num_free_blocks -= 1

    def append_n(self, blocks: Iterable[Block]) -> None:
        """Append; blocks kept elsewhere too go to the head."""
        end, keys, apart = self._end, self._keys, self.apart
        last, count = end.prev_free_block, 0
        for block in blocks:
            count += 1
            key = keys[block.block_id] = block.block_hash
            if apart and key in apart:
                link(end.next_free_block, block)
                last = end.prev_free_block
                continue
            last.next_free_block = block
            block.prev_free_block = last
            block.next_free_block = end
            end.prev_free_block = last = block
        self.num_free_blocks += count

    def prepend_n(self, blocks: Sequence[Block]) -> None:
        """Put blocks at the head, first one first."""
        first = self._end.next_free_block
        for block in blocks:
            self._keys[block.block_id] = None
            link(first, block)
        self.num_free_blocks += len(blocks)

    def unhashed(self, block: Block) -> None:
        """Leave it where it is, as vLLM does."""
        key = self._keys[block.block_id]
        if block.prev_free_block is None or key is None:
            return
        self._keys[block.block_id] = None

    def _lists(self) -> Sequence[End]:
        return (self._end,)
