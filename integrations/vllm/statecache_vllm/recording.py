"""Feeds a recording of the requests that one scheduler of vLLM serves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from statecache.engine.settings import Settings
from statecache.replay import online as shadow
from statecache.trace.recorder import Ended, Observer, TraceRecorder
from statecache_vllm.checkpoint_memory import dry_run_sizes, knows_states
from statecache_vllm.guard import Guard

if TYPE_CHECKING:
    from statecache_vllm.reporting import Report
    from statecache_vllm.scheduler_side import Planner

__all__ = ["Recording", "begin"]

_log = logging.getLogger("statecache.vllm")


class Recording:
    """What the connector hears of requests. A request of embeddings has no tokens: left out.

    `hit_of` says what vLLM found in its cache for a request that is going to be admitted.
    """

    def __init__(self, recorder: TraceRecorder, guard: Guard, hit_of: Callable[[Any], int]) -> None:
        reused: dict[str, int] = {}

        def fail(_request: Any) -> None:
            recorder.stop("a request is not as expected")

        def wanted(request: Any) -> bool:
            has_tokens = request.prompt_token_ids is not None and request.prompt_embeds is None
            return recorder.recording and has_tokens

        def arrived(request: Any) -> None:
            if wanted(request):
                recorder.arrived(request.request_id)

        def admitted(request: Any) -> None:
            reused.setdefault(request.request_id, hit_of(request))

        def ended(request: Any) -> None:
            cached_tokens = reused.pop(request.request_id, 0)
            if wanted(request):
                recorder.ended(request.request_id, _ended(request, cached_tokens))

        self.arrived = guard.wrap(arrived, fail)
        self.admitted = guard.wrap(admitted, fail)
        self.ended = guard.wrap(ended, fail)
        self.close = recorder.close


def begin(settings: Settings, planner: Planner, kv_cache_config: Any) -> Recording | None:
    """Return a recording if the settings ask for one. Raises `SettingsError`."""
    observe = _shadow(settings, planner.report, kv_cache_config) if settings.dry_run else None
    if settings.record is None and observe is None:
        return None
    recorder = TraceRecorder(settings.record, settings.record_mib, _log, observe=observe)
    return Recording(recorder, planner.guard, planner.report.hit_of)


def _shadow(settings: Settings, report: Report, kv_cache_config: Any) -> Observer | None:
    """Return what replays the requests beside the engine; the report shows the numbers."""
    if not knows_states(kv_cache_config):
        _log.warning("statecache: a checkpoint pool does not know this model's states: no dry run")
        return None
    slots, kv_tokens = dry_run_sizes(settings, kv_cache_config)
    replay, observe = shadow.begin(slots, kv_tokens, settings, _log)
    report.also = replay.sample
    return observe


def _ended(request: Any, cached_tokens: int = 0) -> Ended:
    """Return what is recorded of a `Request` of vLLM 0.32.

    It shares a block exactly where `generate_block_hash_extra_keys` lets vLLM share one.
    """
    lora = request.lora_request
    return Ended(
        request.prompt_token_ids,
        request.num_output_tokens,
        (request.cache_salt or None, *((lora.lora_name, lora.lora_path) if lora else ())),
        tuple(
            (one.mm_position.offset, one.mm_position.length, one.identifier)
            for one in request.mm_features
        ),
        request.session_id,
        cached_tokens,
    )
