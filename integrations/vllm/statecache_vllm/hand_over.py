"""Which parts of the plugin are in force in one scheduler, and what vLLM goes on with.

Two parts can fail on their own: the checkpoints (nothing is restored any more) and the block policy
(vLLM's own queue comes back, and with a map of cached blocks that failed vLLM's own map).
A state that a request was promised is never advice: what fails there fails the step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from statecache._blocks import BlockHashIndex, BlockQueue
from statecache.engine.faults import FaultBarrier, guarded
from statecache_vllm.block_queues import GuardedMap, give_back_map, give_back_queue
from statecache_vllm.views import BlockMap, BlockPool, FreeQueue

if TYPE_CHECKING:
    from statecache_vllm.checkpoints import CheckpointManager

__all__ = ["ActiveParts", "new_barrier"]

_log = logging.getLogger("statecache.vllm")


def new_barrier() -> FaultBarrier:
    """Return a barrier that says what becomes of the part behind it."""
    return FaultBarrier(_log, "vLLM goes on by itself in its place")


class ActiveParts:
    """The parts of one scheduler: `queue` is None once, or while, vLLM's own is in its place.

    `checkpoints` is None once, or while, nothing is restored.
    """

    def __init__(self) -> None:
        self.faults = new_barrier()
        self.queue: BlockQueue | None = None
        self.checkpoints: CheckpointManager | None = None
        self.pool: BlockPool
        self.block_index: BlockHashIndex
        self.owns_blocks = False
        self._overridden: Callable[[], str | None]
        self._map_failed = False

    def take_blocks(self, queue: BlockQueue, overridden: Callable[[], str | None]) -> None:
        """`queue` and `block_index` rule the pool from now on.

        `overridden` names a method that another plugin has changed since, which ours would hide.
        """
        self.queue = queue
        self.owns_blocks = True
        self._overridden = overridden

    def end_checkpoints(self) -> None:
        """Store and restore nothing any more. What was already planned for this step is done."""
        self.checkpoints = None
        if self.queue is not None:
            self._forget_duplicates()

    def _leave_duplicates(self) -> None:
        """They only say which blocks go first."""

    @guarded(_leave_duplicates)
    def _forget_duplicates(self) -> None:
        self.block_index.clear_checkpoints()

    def hand_over_queue(self) -> FreeQueue:
        """Give the pool vLLM's own queue, with what depends on ours; return it."""
        if self.queue is not None:
            self.queue = None
            self.end_checkpoints()
            give_back_queue(self.pool)
        return self.pool.free_block_queue

    def hand_over_map(self) -> BlockMap:
        """Give the pool vLLM's own map and return it. The queue, which reads ours, goes later.

        Now `BlockPool.get_new_blocks` may hold blocks that look free.
        """
        self._map_failed = True
        if isinstance(self.pool.cached_block_hash_to_block, GuardedMap):
            give_back_map(self.pool)
        return self.pool.cached_block_hash_to_block

    def finish_hand_over(self) -> None:
        """The queue goes too where the map has gone: no call of the pool is under way."""
        if self._map_failed:
            self.hand_over_queue()

    def before_step(self) -> None:
        """Finish what failed, and let in what other plugins put into vLLM's own classes."""
        if self.queue is not None and not self._map_failed:
            method = self._overridden()
            if method is None:
                return
            self.faults.count(f"another plugin changed {method}")
            self.hand_over_map()
        self.finish_hand_over()
