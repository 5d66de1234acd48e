"""Requests of vLLM's queue whose state is stored, but not yet known to be good.

What became of a store is told a step later, so that no worker waits for it. A request that comes in
between stays in the queue until then: its prompt is not computed again for that.
"""

from __future__ import annotations

from statecache_vllm.views import Request

__all__ = ["AwaitedReports"]

# A report takes a step or two. This only ends the wait of a request should one be lost.
_MOST_WAITS = 1000


class AwaitedReports:
    """Which state each request of one scheduler waits for, and how often it did: `waits`, by name.

    A request waits for one report: where others store deeper states at every step, it would else
    wait for all of them.
    """

    def __init__(self) -> None:
        self.waits: dict[str, tuple[int, int]] = {}

    def must_wait(self, request: Request, state: int) -> bool:
        """Whether a request stays in the queue for this step, as the report of `state` is to come.

        If not, it goes on with what is known to be good.
        """
        awaited, waits = self.waits.get(request.request_id, (state, 0))
        if state != awaited:
            return False
        self.waits[request.request_id] = (state, waits + 1)
        return waits < _MOST_WAITS

    def finished(self, request: Request) -> None:
        """Forget a request."""
        self.waits.pop(request.request_id, None)
