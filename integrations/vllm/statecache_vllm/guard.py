"""Where an error of the plugin stops, and what vLLM goes on with.

Advice must never take a server down: an unexpected error is counted, the first one is logged, and
the part that failed hands back to vLLM's own behaviour. Two parts can fail on their own: the
checkpoint book (nothing is restored any more) and the block order (vLLM's own queue comes back).
A state that a request was promised is never advice: what fails there fails the step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from statecache_vllm import seams

__all__ = ["Guard", "GuardedQueue", "guarded_touch", "vllms_own_queue"]

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
        self.remove: Callable[[Any], None] = queue.remove  # by `guarded_touch`
        self.append: Callable[[Any], None] = guarded("append")
        self.append_n: Callable[[Sequence[Any]], None] = guarded("append_n")
        self.prepend_n: Callable[[Sequence[Any]], None] = guarded("prepend_n")
        self.get_all_free_blocks: Callable[[], list[Any]] = guarded("get_all_free_blocks")
        self.iter_blocks_after: Callable[[Any], Iterator[Any]] = guarded("iter_blocks_after")

    @property
    def num_free_blocks(self) -> int:
        """How many blocks are free."""
        return int(self._queue.num_free_blocks)


def guarded_touch(
    touch: Callable[[Sequence[Any]], None], guard: Guard, hand_over: Callable[[], Any]
) -> Callable[[Sequence[Any]], None]:
    """Return `BlockPool.touch`, guarded.

    In vLLM 0.32 nothing else calls `remove`, and it does for every block: a guard around each call
    would cost what the order gains. Blocks before the one that failed are counted as used.
    """

    def go_on(blocks: Sequence[Any]) -> None:
        free = (at for at, one in enumerate(blocks) if one.ref_cnt == 0 and not one.is_null)
        failed = next(free, None)
        hand_over()
        if failed is None:
            raise RuntimeError("statecache: BlockPool.touch failed by itself")
        touch(blocks[failed:])

    return guard.wrap(touch, go_on)


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
