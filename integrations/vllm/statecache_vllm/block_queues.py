"""The free queue and the map of cached blocks that take the place of vLLM's, and the way back.

An operation that fails in ours is done again in vLLM's, so that the pool never sees the failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from statecache._blocks import BlockHashIndex, BlockQueue, FifoQueue, ReuseQueue
from statecache.engine.faults import FaultBarrier
from statecache.engine.settings import Settings
from statecache_vllm import seams
from statecache_vllm.cache_layout import CacheLayout
from statecache_vllm.views import BlockMap, BlockPool, FoundBlocks, FreeQueue, KVCacheBlock, Request

__all__ = [
    "GuardedMap",
    "GuardedQueue",
    "ProtectedRequests",
    "give_back_map",
    "give_back_queue",
    "new_queue",
]


def new_queue(
    settings: Settings, index: BlockHashIndex, layout: CacheLayout
) -> tuple[BlockQueue, ProtectedRequests | None]:
    """Return the empty queue of the block policy, and what tells it of requests if it listens."""
    if settings.block_policy != "reuse":
        return FifoQueue(index), None
    attention = layout.attention_groups
    queue = ReuseQueue(index, seams.key_of(b"", attention[0]) if attention else b"")
    return queue, ProtectedRequests(queue, layout)


def _guards(
    native: object, faults: FaultBarrier, hand_over: Callable[[], object]
) -> Callable[[str], Callable[..., Any]]:
    """Return what puts a method of `native`, by its name, behind the barrier."""

    def guarded(name: str) -> Callable[..., Any]:
        def in_vllms(*args: object) -> object:
            return getattr(hand_over(), name)(*args)

        return faults.wrap(getattr(native, name), in_vllms)

    return guarded


class GuardedQueue:
    """A block queue as the pool sees it. `hand_over` puts vLLM's own in its place.

    Its methods are those of the native queue behind a barrier: some run for every block, where one
    more Python function would cost as much as the policy gains.
    """

    def __init__(
        self, queue: BlockQueue, faults: FaultBarrier, hand_over: Callable[[], FreeQueue]
    ) -> None:
        guarded = _guards(queue, faults, hand_over)
        self._queue = queue
        self.popleft: Callable[[], KVCacheBlock] = guarded("popleft")
        self.popleft_n: Callable[[int], list[KVCacheBlock]] = guarded("popleft_n")
        self.remove: Callable[[KVCacheBlock], None] = guarded("remove")
        self.append: Callable[[KVCacheBlock], None] = guarded("append")
        self.append_n: Callable[[Sequence[KVCacheBlock]], None] = guarded("append_n")
        self.prepend_n: Callable[[Sequence[KVCacheBlock]], None] = guarded("prepend_n")
        self.get_all_free_blocks: Callable[[], list[KVCacheBlock]] = guarded("get_all_free_blocks")
        self.iter_blocks_after: Callable[[KVCacheBlock | None], Iterator[KVCacheBlock]] = guarded(
            "iter_blocks_after"
        )

    @property
    def num_free_blocks(self) -> int:
        """How many blocks are free."""
        return int(self._queue.num_free_blocks)


class GuardedMap:
    """The map of cached blocks as the pool sees it, with all that vLLM 0.32 calls of it.

    `hand_over` puts vLLM's own map in its place. A lookup asks for every block of a prompt, so
    `get_one_block` is the native one; `Lookup` guards the lookup as a whole.
    """

    def __init__(
        self, index: BlockHashIndex, faults: FaultBarrier, hand_over: Callable[[], BlockMap]
    ) -> None:
        guarded = _guards(index, faults, hand_over)
        self.get_one_block: Callable[[bytes], KVCacheBlock | None] = index.get_one_block
        self.contain: Callable[[bytes, int], bool] = guarded("contain")
        self.insert: Callable[[bytes, KVCacheBlock], None] = guarded("insert")
        self.pop: Callable[[bytes, int], KVCacheBlock | None] = guarded("pop")
        self._length: Callable[[], int] = guarded("__len__")

    def __len__(self) -> int:
        """Return how many keys are cached."""
        return int(self._length())


def give_back_map(pool: BlockPool) -> BlockMap:
    """Give `pool` vLLM's own map, filled by what the blocks themselves say, and return it."""
    own = seams.vllms_map()
    seams.set_block_map(pool, own)
    for block in pool.blocks:
        if block.block_hash is not None:
            own.insert(block.block_hash, block)
        for key in sorted(pool.cached_block_hashes_by_block.get(block.block_id, ())):
            own.insert(key, block)
    return own


def give_back_queue(pool: BlockPool) -> FreeQueue:
    """Give `pool` vLLM's own queue with every block that no request uses, and return it.

    Blocks without a hash go first. `BlockPool.free_blocks` of vLLM 0.32 puts blocks back in two
    calls; when the first one fails, those of the second are here already, and move.
    """
    free = [block for block in pool.blocks if block.ref_cnt == 0 and not block.is_null]
    for block in pool.blocks:
        block.prev_free_block = block.next_free_block = None
    free.sort(key=lambda block: block.block_hash is not None)
    queue = seams.vllms_queue(free)
    seams.set_free_queue(pool, queue)
    return queue


class ProtectedRequests:
    """Requests that resume from at least three quarters of their blocks, for `ReuseQueue`.

    Their blocks are protected: they go after those on probation, which were used by one request.
    """

    def __init__(self, queue: ReuseQueue, layout: CacheLayout) -> None:
        self._queue = queue
        self._layout = layout
        self._protected, self._looked_up = set[str](), set[str]()

    @property
    def known(self) -> set[str]:
        """The names of all requests something is held of."""
        return self._protected | self._looked_up

    def looked_up(self, request: Request, found: FoundBlocks) -> None:
        """Tell the queue, once a request, which blocks it would have used; note if it resumes."""
        name, (_, hit, resident) = request.request_id, found
        block = self._layout.block_tokens
        if name not in self._looked_up:
            self._looked_up.add(name)
            missing: Sequence[bytes] = ()
            if self._queue.watches:
                step = self._layout.hashes_per_block
                missing = request.block_hashes[(max(hit, resident) // block + 1) * step - 1 :: step]
            self._queue.looked_up(missing)
        if hit and 4 * (hit // block) >= 3 * (request.num_tokens // block):
            self._protected.add(name)
        else:
            self._protected.discard(name)

    def allocate_slots(
        self,
        original: Callable[..., Any],
        request: Request,
        *args: object,
        **kwargs: object,
    ) -> Any:
        """Around `KVCacheManager.allocate_slots`: the queue hears whose blocks are protected."""
        if request.request_id not in self._protected:
            return original(request, *args, **kwargs)
        self._queue.start_protected = True
        try:
            return original(request, *args, **kwargs)
        finally:
            self._queue.start_protected = False

    def finished(self, name: str) -> None:
        """Forget a request."""
        self._protected.discard(name)
        self._looked_up.discard(name)
