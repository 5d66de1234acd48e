"""What the block order `reuse` learns from requests: whose blocks are proven."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from statecache._blocks import ReuseQueue

__all__ = ["ProvenRequests"]


class ProvenRequests:
    """Requests that resume from at least three quarters of their blocks.

    Args:
        block: Tokens of a block.
        hashes_a_block: Hashes vLLM takes of the tokens of one.

    """

    def __init__(self, block: int, hashes_a_block: int) -> None:
        self._block, self._hashes_a_block = block, hashes_a_block
        self._proven, self._looked_up = set[str](), set[str]()

    @property
    def known(self) -> set[str]:
        """The names of all requests something is held of."""
        return self._proven | self._looked_up

    def looked_up(self, queue: ReuseQueue, request: Any, found: Any) -> None:
        """Tell the queue, once a request, which blocks it would have used; note if it is proven."""
        name, (_, hit, boundary) = request.request_id, found
        if name not in self._looked_up:
            self._looked_up.add(name)
            missing: Sequence[bytes] = ()
            if queue.watches:
                resident, step = max(hit, boundary) // self._block, self._hashes_a_block
                missing = request.block_hashes[(resident + 1) * step - 1 :: step]
            queue.looked_up(missing)
        if hit and 4 * (hit // self._block) >= 3 * (request.num_tokens // self._block):
            self._proven.add(name)
        else:
            self._proven.discard(name)

    def around_allocate(
        self, original: Callable[..., Any], queue: ReuseQueue
    ) -> Callable[..., Any]:
        """Around `KVCacheManager.allocate_slots`: the queue hears whose blocks are proven."""
        proven = self._proven

        def allocate_slots(request: Any, *args: Any, **kwargs: Any) -> Any:
            if request.request_id not in proven:
                return original(request, *args, **kwargs)
            queue.start_protected = True
            try:
                return original(request, *args, **kwargs)
            finally:
                queue.start_protected = False

        return allocate_slots

    def finished(self, name: str) -> None:
        """Forget a request."""
        self._proven.discard(name)
        self._looked_up.discard(name)
