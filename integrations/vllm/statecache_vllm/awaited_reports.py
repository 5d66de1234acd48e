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
    """How often each request of one scheduler was told to wait for a report: `waits`, by name."""

    def __init__(self) -> None:
        self.waits: dict[str, int] = {}

    def must_wait(self, request: Request) -> bool:
        """Whether a request stays in the queue for this step: the report it needs is to come."""
        waits = self.waits.get(request.request_id, 0) + 1
        self.waits[request.request_id] = waits
        return waits <= _MOST_WAITS

    def finished(self, request: Request) -> None:
        """Forget a request."""
        self.waits.pop(request.request_id, None)
