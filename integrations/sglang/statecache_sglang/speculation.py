"""Speculative decoding: how far a request's own state has run, and what the drafter did.

A verify step moves the state of a request to the last token that was accepted. What a client gets
may end before that: at a stop inside the accepted run, or where a grammar ends. Without the extra
buffer the state at the end of a request is that one, and no key ends where it does. SGLang 0.5.23
caches none of these after a verify step; 0.5.22 does, and both do where a request ends in a step
that mixes its next token with the prefill of another one.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from statecache.engine.metrics import BestEffort, MetricKey
from statecache_sglang.scheduler_side import scheduler_side_of
from statecache_sglang.views import DecodeBatch, Request, ResultProcessor, VerifyResult

if TYPE_CHECKING:
    from statecache_sglang.scheduler_side import SchedulerSide

__all__ = ["begin", "is_past_stop", "live_tokens", "note_uncached", "note_verified"]

_DRAFT_TOKENS = MetricKey.DRAFT_TOKENS.value
_ACCEPTED_TOKENS = MetricKey.ACCEPTED_TOKENS.value
_LOST_TOKENS = MetricKey.DRAFT_LOST_TOKENS.value
_PAST_STOP = MetricKey.SKIPS.of("past_stop")
_NOT_TOLD = "what a verify step accepted is not known: states of its requests are not cached"
_UNKNOWN = sys.maxsize  # tokens of a state that nothing says the number of: no key has as many


def note_verified(
    original: Callable[..., list[list[int]]],
    processor: ResultProcessor,
    result: VerifyResult,
    batch: DecodeBatch,
) -> list[list[int]]:
    """Around `_resolve_spec_v2_tokens`, which commits what a verify step accepted.

    Where that cannot be told, an anomaly is counted, and the states of its requests are not cached.
    """
    begins: list[int] = []
    with contextlib.suppress(Exception):  # then they are fewer than the requests
        begins = [req.kv.kv_committed_len for req in batch.reqs]
    kept = original(processor, result, batch)
    side = scheduler_side_of(processor.tree_cache)
    try:
        _note(result, batch, begins)
    except Exception:
        for req in batch.reqs:
            req.statecache_verified_tokens = _UNKNOWN
        if side is not None:
            side.faults.count(_NOT_TOLD, traceback=True, takes_over=False)
    else:
        if side is not None:
            _count(side, result, len(begins))
    return kept


def _note(result: VerifyResult, batch: DecodeBatch, begins: list[int]) -> None:
    beside = result.num_non_draft_tokens_per_req
    accepted = result.num_correct_drafts_per_req_cpu[: len(batch.reqs)]  # the rest is padding
    for req, begin, drafts in zip(batch.reqs, begins, accepted, strict=True):
        if not (req.finished() or req.is_retracted):
            req.statecache_verified_tokens = begin + drafts + beside


def _count_drafts(side: SchedulerSide, result: VerifyResult, requests: int) -> None:
    width = result.speculative_num_draft_tokens or 0
    drafted = max(width - result.num_non_draft_tokens_per_req, 0)
    side.counts.add(_DRAFT_TOKENS, requests * drafted)
    side.counts.add(_ACCEPTED_TOKENS, sum(result.num_correct_drafts_per_req_cpu[:requests]))


_count = BestEffort(_count_drafts)


def begin(req: Request) -> None:
    """A request starts, perhaps again: its state is that of a prefill, not of a verify step."""
    req.statecache_verified_tokens = 0


def live_tokens(req: Request) -> int:
    """Return of how many tokens the state in the request's own slot is, between two steps.

    Every token but the last one of the output was computed; a verify step may have computed more.
    """
    computed = len(req.origin_input_ids) + len(req.output_ids) - 1
    verified = getattr(req, "statecache_verified_tokens", 0)
    return max(req.kv.kv_committed_len, computed, verified)


def is_past_stop(side: SchedulerSide | None, req: Request, tokens: int) -> bool:
    """Whether a request that ends has run past its first `tokens`, which its key would name."""
    if live_tokens(req) <= tokens:
        return False
    if side is not None:
        side.counts.add(_PAST_STOP)
        side.counts.add(_LOST_TOKENS, max(tokens - req.kv.cache_protected_len, 0))
    return True


def note_uncached(
    original: Callable[..., bool], processor: ResultProcessor, req: Request, *args: object
) -> bool:
    """Around `_mamba_can_cache_finished_req`: what SGLang itself does not cache counts, too."""
    can = original(processor, req, *args)
    if not can:
        _count_uncached(processor, req)
    return can


def _count_past_stop(processor: ResultProcessor, req: Request) -> None:
    is_past_stop(scheduler_side_of(processor.tree_cache), req, req.owned_kv_len())


_count_uncached = BestEffort(_count_past_stop)
