"""Queued requests that wait for the state of a head that another request is computing.

`statecache.engine.shared_heads` says who waits for whom; here is what it needs to know of SGLang.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from statecache.engine.metrics import EventCounters
from statecache.engine.settings import Settings
from statecache.engine.shared_heads import Prompt, SharedHeads
from statecache_sglang.seams import scheduler
from statecache_sglang.views import (
    PrefillAdder,
    Request,
)

__all__ = ["HeadWaits"]


class HeadWaits:
    """The shared heads of one scheduler, and its queue as it was last sorted."""

    def __init__(self, settings: Settings, counts: EventCounters) -> None:
        self._on = settings.wait_for_head == "on"
        self._heads = SharedHeads(settings.cost_model(), counts)
        self._queue: Sequence[Request] = ()

    def note_queue(self, queue: Sequence[Request]) -> None:
        """The requests that wait, in the order in which they are going to be asked."""
        self._queue = queue

    def cut(self, req: Request, at: int, limit: int, grid: int) -> int | None:
        """Return where between `at` and `limit` queued requests part from `req`, if it is worth it.

        A multiple of `grid`.
        """
        if not (self._on and self._queue and _shares(req)):
            return None
        queued = ((other, _prompt(other)) for other in self._queue if _shares(other))
        return self._heads.cut(req, _prompt(req), at, limit, queued, grid)

    def computing(self, req: Request, begin: int, end: int | None) -> None:
        """The next step computes `req` from `begin`, and leaves a state at `end`, if anywhere."""
        if self._on and _shares(req):
            states = () if end is None else (end,)
            self._heads.computing(req, _prompt(req), begin, states)

    def computed(self, req: Request, tokens: int) -> None:
        """The state of `req` after so many tokens is cached now, or will not be."""
        self._heads.computed(req, tokens)

    def should_wait(self, adder: PrefillAdder, req: Request) -> bool:
        """Whether a queued request, just matched, is to be passed over."""
        if not (self._on and _shares(req)):
            return False
        hit = req.prefix_len + req.host_hit_length
        return self._heads.should_wait(req, _prompt(req), hit, _runs_with(adder))

    def comes_next(self, req: Request) -> bool:
        """Whether a request is passed over, once, as it could not be cut in this step.

        Queued requests share a head with it that would be computed by each of them.
        """
        if not (self._on and _shares(req)) or getattr(req, "statecache_passed_over", False):
            return False
        at, tokens = req.prefix_len + req.host_hit_length, len(req.full_untruncated_fill_ids)
        req.statecache_passed_over = self.cut(req, at, tokens, 1) is not None
        return req.statecache_passed_over

    def admitted(self, req: Request) -> None:
        """A queued request is going to be prefilled."""
        self._heads.admitted(req, req.prefix_len)


def _prompt(req: Request) -> Prompt:
    return Prompt(req.origin_input_ids, scheduler.namespace_of(req))


def _shares(req: Request) -> bool:
    """Whether what a request computes is cached for others, and it may resume from their states."""
    return (
        req.session is None
        and not req.skip_radix_cache_insert
        and not req.return_logprob
        and scheduler.has_tokens(req)
    )


def _runs_with(adder: PrefillAdder) -> Callable[[object], bool]:
    def is_running(req: Request) -> bool:
        if req in adder.can_run_list:
            return True
        ends = req.finished() or req.to_finish is not None or req.skip_radix_cache_insert
        return req.kv.holds_kv and not ends

    return is_running  # type: ignore[return-value]  # of requests, as what is noted here is
