"""What vLLM does to its block pool, as the plugin's queue, map and checkpoints hear of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from statecache._blocks import BlockQueue
from statecache.engine.faults import guarded
from statecache.engine.patching import bind_dynamically, original_function
from statecache_vllm import seams
from statecache_vllm.block_queues import GuardedMap, GuardedQueue
from statecache_vllm.cache_layout import CacheLayout
from statecache_vllm.hand_over import ActiveParts
from statecache_vllm.views import BlockPool, FreeQueue, KVCacheBlock

__all__ = ["PoolChanges"]


class PoolChanges:
    """Hits, evictions and resets of one pool whose queue is the plugin's.

    `guarded_queue` is what the pool has as its queue while ours is in force. `forget` drops all
    that was found and stored before a reset.
    """

    def __init__(
        self,
        parts: ActiveParts,
        layout: CacheLayout,
        queue: BlockQueue,
        forget: Callable[[], None],
    ) -> None:
        self.faults = parts.faults
        self._forget = forget
        self._parts = parts
        self._pool = parts.pool
        self._state_groups = layout.state_groups
        self._kv_endings = tuple(seams.key_of(b"", group) for group in layout.attention_groups)
        self._touch = bind_dynamically(self._pool, "touch")
        self._vllms_touch = original_function(type(self._pool), "touch")
        self._counts_null = _counts_null(self._pool)
        self._queue = queue
        self.guarded_queue: FreeQueue = GuardedQueue(queue, self.faults, parts.hand_over_queue)

    def new_map(self) -> GuardedMap:
        """Return what the pool has as its map of cached blocks while ours is in force."""
        return GuardedMap(self._parts.block_index, self.faults, self._parts.hand_over_map)

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """In the place of `BlockPool.touch`: all blocks of a hit leave the queue at once.

        vLLM 0.32's own asks block by block, which costs more than the policy gains. It is back as
        soon as the pool has another queue, and called as soon as another plugin has put something
        around it.
        """
        pool = self._pool
        if blocks and blocks[0].is_null and not self._counts_null:
            blocks = [block for block in blocks if not block.is_null]
        ours = pool.free_block_queue is self.guarded_queue
        if ours and type(pool).touch is not self._vllms_touch:
            used = [block for block in blocks if block.ref_cnt and not block.is_null]
            self._touch(blocks)
            if pool.free_block_queue is self.guarded_queue:
                self._note_used(used)
        elif not ours or not self._leave_queue(blocks):
            self._touch(blocks)
        elif pool.metrics_collector:
            for block in blocks:
                pool.metrics_collector.on_block_accessed(block)

    def _touch_in_vllms(self, _: Sequence[KVCacheBlock]) -> bool:
        self._parts.hand_over_queue()
        return False

    @guarded(_touch_in_vllms)
    def _leave_queue(self, blocks: Sequence[KVCacheBlock]) -> bool:
        self._queue.touch(blocks)
        return True

    def _hand_over_queue(self, *_: object) -> None:
        self._parts.hand_over_queue()

    @guarded(_hand_over_queue)
    def _note_used(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._queue.hit_in_use(blocks)

    def reset_prefix_cache(self, original: Callable[[], bool]) -> bool:
        """Around `BlockPool.reset_prefix_cache`, which never tells the connector (vLLM 0.32)."""
        done = original()
        self._parts.finish_hand_over()
        if done:
            self._forget()
            if self._parts.queue is not None:
                self._refill()
        return done

    @guarded(_hand_over_queue)
    def _refill(self) -> None:
        self._parts.block_index.clear()
        seams.set_block_map(self._pool, self.new_map())
        self._queue.reset()

    def evict_blocks(self, original: Callable[[set[int]], None], block_ids: set[int]) -> None:
        """Around `BlockPool.evict_blocks`, which clears hashes of blocks that are queued."""
        blocks = self._pool.blocks
        own = [blocks[index] for index in sorted(block_ids) if index < len(blocks)]
        hashed = [(block, block.block_hash) for block in own if block.block_hash is not None]
        original(block_ids)
        if self._parts.queue is not None:
            self._note_evicted(hashed)

    @guarded(_hand_over_queue)
    def _note_evicted(self, hashed: Sequence[tuple[KVCacheBlock, bytes]]) -> None:
        queue = self._queue
        for block, key in hashed:
            queue.unhashed(block)
            if queue.lost is not None and key not in self._parts.block_index:
                queue.lost(key)

    def _end_checkpoints(self, *_: object) -> None:
        self._parts.end_checkpoints()

    @guarded(_end_checkpoints)
    def key_left(self, key: bytes) -> None:
        """No block holds what is cached under `key` any more: a state needs its KV."""
        if key.endswith(self._kv_endings) and self._parts.checkpoints is not None:
            self._parts.checkpoints.drop_below(seams.plain_hash(key))

    def note_checkpoint(self, block_hash: bytes, resident: bool) -> None:
        """A state was put into a checkpoint or dropped: its blocks are duplicates, or no more."""
        if self._parts.queue is None:
            return
        for group in self._state_groups:
            key = seams.key_of(block_hash, group)
            self._parts.block_index.set_has_checkpoint(key, resident)


def _counts_null(pool: BlockPool) -> bool:
    """Whether vLLM counts the uses of the null block, which it did before 0.33."""
    null = pool.null_block
    before = null.ref_cnt
    pool.touch([null])
    counts = null.ref_cnt != before
    pool.free_blocks([null])
    return counts
