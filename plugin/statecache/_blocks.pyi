"""The native queues of free blocks. Contracts: cpp/include/statecache/block_queue.h and its kin.

A block is any object with an integer `block_id`, its place in the list `blocks` of its pool, an
integer `ref_cnt` and a truth `is_null`. A block that is not the pool's raises `ValueError`, as do
more blocks asked for than are free; a block that is free and should not be, or the other way
around, `RuntimeError`. A call that raises changes nothing.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

@final
class BlockHashIndex:
    """What the blocks of a pool hold: under each key one or several. In an engine's map's place.

    A key that `has_checkpoint` is kept in a checkpoint too, so that no block need hold it. Keys are
    bytes.
    """

    def __new__(cls, blocks: Iterable[Any]) -> BlockHashIndex: ...
    def get_one_block(self, key: bytes, /) -> Any | None:
        """Return the block that has been cached under the key for longest."""

    def contain(self, key: bytes, block_id: int, /) -> bool:
        """Whether this block is cached under the key."""

    def insert(self, key: bytes, block: Any, /) -> None:
        """Cache a block; one that is cached under the key stays where it is."""

    def pop(self, key: bytes, block_id: int, /) -> Any | None:
        """Take a block out and return it, None if it is not cached under the key."""

    def __len__(self) -> int:
        """Return how many keys are cached."""

    def __contains__(self, key: bytes, /) -> bool:
        """Whether a block is cached under the key."""

    def clear(self) -> None:
        """Take out every block. Checkpoints stay. Queues have to be told: `reset`."""

    def set_has_checkpoint(self, key: bytes, has_checkpoint: bool, /) -> None:
        """Say whether the key is kept in a checkpoint too."""

    def has_checkpoint(self, key: bytes, /) -> bool:
        """Whether the key is kept in a checkpoint too."""

    def clear_checkpoints(self) -> None:
        """No key has a checkpoint any more."""

class BlockQueue:
    """Free blocks in the order in which they are handed out: at first none. Single-threaded.

    Blocks that are cached under no key go first, and those whose key has a checkpoint. `lost` is
    told each key whose last copy has been handed out; what it raises is reported, not raised.
    """

    lost: Callable[[bytes], object] | None
    @property
    def num_free_blocks(self) -> int: ...
    def popleft_n(self, n: int) -> list[Any]:
        """Hand out `n` blocks. Their keys may be in the cache until the next call."""

    def popleft(self) -> Any:
        """Hand out one block."""

    def append_n(self, blocks: Iterable[Any]) -> None:
        """Take blocks back, in the order in which they should go."""

    def append(self, block: Any) -> None:
        """Take one block back."""

    def prepend_n(self, blocks: Iterable[Any]) -> None:
        """Take back blocks without a key: they go first, the first one before the others."""

    def touch(self, blocks: Iterable[Any]) -> None:
        """One more request uses these blocks: `ref_cnt` grows by one, free ones leave the queue.

        A block that `is_null` is only counted. One that is named twice leaves once.
        """

    def hit_in_use(self, blocks: Iterable[Any]) -> None:
        """Blocks that are in use were hit once more; `touch` knows without being told."""

    def remove(self, block: Any) -> None:
        """A free block was hit and is in use again."""

    def unhashed(self, block: Any) -> None:
        """A block is cached under no key any more. It may be in use."""

    def reset(self) -> None:
        """What is cached was cleared."""

    def get_all_free_blocks(self) -> list[Any]:
        """Return every free block, roughly in the order in which they would go."""

    def iter_blocks_after(self, cursor: Any | None) -> Iterator[Any]:
        """As `get_all_free_blocks`, from behind `cursor` on; nothing if that is in use."""

class FifoQueue(BlockQueue):
    """First in, first out."""

    def __init__(self, cached: BlockHashIndex) -> None: ...

class ReuseQueue(BlockQueue):
    """Duplicates first, then what was never reused before what was; how much before is learnt.

    Of keys that end with `ending` it is watched whether they are asked for again.
    """

    start_protected: bool
    def __init__(self, cached: BlockHashIndex, ending: bytes) -> None: ...
    @property
    def ratio(self) -> int:
        """How many steps older a protected block must be to go before one on probation."""

    @property
    def watches(self) -> bool:
        """Whether anything was dropped that a lookup could ask for."""

    def looked_up(self, missing: Iterable[bytes]) -> None:
        """A request was looked up for the first time: these keys, less `ending`, are not cached."""
