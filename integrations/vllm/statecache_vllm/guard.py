"""Where an error of the plugin stops, and what vLLM goes on with.

Advice must never take a server down: an unexpected error is counted, the first one is logged, and
the part that failed hands back to vLLM's own behaviour. Two parts can fail on their own: the
checkpoint book (nothing is restored any more) and the block order (vLLM's own queue comes back, and
with a map of cached blocks that failed vLLM's own map).
A state that a request was promised is never advice: what fails there fails the step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from statecache.engine.patching import bind_dynamically, original_function
from statecache_vllm import seams

__all__ = [
    "Guard",
    "GuardedCache",
    "GuardedQueue",
    "guarded_touch",
    "vllms_own_map",
    "vllms_own_queue",
]

_log = logging.getLogger("statecache.vllm")
_T = TypeVar("_T")


class Guard:
    """Counts what must not happen and logs the first of it."""

    def __init__(self) -> None:
        self.anomalies = 0

    def wrap(self, call: Callable[..., _T], instead: Callable[..., _T]) -> Callable[..., _T]:
        """Return `call` that never raises an `Exception`: then it returns what `instead` does.

        Positional arguments only: some of these calls are made for every block.
        """

        def guarded(*args: Any) -> _T:
            try:
                return call(*args)
            except Exception:
                self.count("an unexpected error", traceback=True)
            return instead(*args)

        return guarded

    def count(self, what: str, *, traceback: bool = False) -> None:
        """Count something that must not happen; log the first one."""
        self.anomalies += 1
        if self.anomalies == 1:
            _log.error(
                "statecache: %s; vLLM goes on by itself in its place", what, exc_info=traceback
            )


class GuardedQueue:
    """A block queue as the pool sees it. `hand_over()` puts vLLM's own in its place, once.

    An operation that failed is done again there, so that the pool never sees the failure.
    """

    def __init__(self, queue: Any, guard: Guard, hand_over: Callable[[], Any]) -> None:
        def guarded(name: str) -> Callable[..., Any]:
            def again(*args: Any) -> Any:
                return getattr(hand_over(), name)(*args)

            return guard.wrap(getattr(queue, name), again)

        self._queue = queue
        self.popleft: Callable[[], Any] = guarded("popleft")
        self.popleft_n: Callable[[int], list[Any]] = guarded("popleft_n")
        self.remove: Callable[[Any], None] = guarded("remove")
        self.append: Callable[[Any], None] = guarded("append")
        self.append_n: Callable[[Sequence[Any]], None] = guarded("append_n")
        self.prepend_n: Callable[[Sequence[Any]], None] = guarded("prepend_n")
        self.get_all_free_blocks: Callable[[], list[Any]] = guarded("get_all_free_blocks")
        self.iter_blocks_after: Callable[[Any], Iterator[Any]] = guarded("iter_blocks_after")

    @property
    def num_free_blocks(self) -> int:
        """How many blocks are free."""
        return int(self._queue.num_free_blocks)


class GuardedCache:
    """The map of cached blocks as the pool sees it, with all that vLLM 0.32 calls of it.

    `hand_over()` puts vLLM's own map in its place, where what failed is done again. A look-up is
    guarded as a whole, by the planner: it asks for every block of a prompt.
    """

    def __init__(self, cached: Any, guard: Guard, hand_over: Callable[[], Any]) -> None:
        def guarded(name: str) -> Callable[..., Any]:
            def again(*args: Any) -> Any:
                return getattr(hand_over(), name)(*args)

            return guard.wrap(getattr(cached, name), again)

        self.get_one_block: Callable[[bytes], Any] = cached.get_one_block
        self.contain: Callable[[bytes, int], bool] = guarded("contain")
        self.insert: Callable[[bytes, Any], None] = guarded("insert")
        self.pop: Callable[[bytes, int], Any] = guarded("pop")
        self._length = guarded("__len__")

    def __len__(self) -> int:
        """Return how many keys are cached."""
        return int(self._length())


def guarded_touch(pool: Any, queue: Any, guard: Guard, hand_over: Callable[[], Any]) -> Any:
    """Return what takes the place of `BlockPool.touch`: all blocks of a hit leave `queue` at once.

    vLLM 0.32's own asks block by block, which costs more than the order gains. It is back as soon
    as the pool has another queue, and called as soon as another plugin has put something around it.
    """
    original, own, base = bind_dynamically(pool, "touch"), pool.free_block_queue, type(pool)
    vllms = original_function(base, "touch")
    leave = guard.wrap(queue.touch, hand_over)  # returns None unless it failed
    hit_in_use = guard.wrap(queue.hit_in_use, hand_over)

    def touch_as_others_do(blocks: Sequence[Any]) -> None:
        used = [block for block in blocks if block.ref_cnt and not block.is_null]
        original(blocks)
        if pool.free_block_queue is own:
            hit_in_use(used)

    def touch(blocks: Sequence[Any]) -> None:
        if pool.free_block_queue is own and base.touch is not vllms:
            touch_as_others_do(blocks)
        elif pool.free_block_queue is not own or leave(blocks) is not None:
            original(blocks)
        elif pool.metrics_collector:
            for block in blocks:
                pool.metrics_collector.on_block_accessed(block)

    return touch


def vllms_own_map(pool: Any) -> Any:
    """Give `pool` vLLM's own map, filled by what the blocks themselves say, and return it."""
    own = pool.cached_block_hash_to_block = seams.vllms_map()
    for block in pool.blocks:
        if block.block_hash is not None:
            own.insert(block.block_hash, block)
        for key in sorted(pool.cached_block_hashes_by_block.get(block.block_id, ())):
            own.insert(key, block)
    return own


def vllms_own_queue(pool: Any) -> Any:
    """Give `pool` vLLM's own queue with every block that no request uses, and return it.

    Blocks without a hash go first. `BlockPool.free_blocks` of vLLM 0.32 puts blocks back in two
    calls; when the first one fails, those of the second are here already, and move.
    """
    free = [block for block in pool.blocks if block.ref_cnt == 0 and not block.is_null]
    for block in pool.blocks:
        block.prev_free_block = block.next_free_block = None
    free.sort(key=lambda block: block.block_hash is not None)
    queue = pool.free_block_queue = seams.rebuilt_queue()(free)
    return queue
