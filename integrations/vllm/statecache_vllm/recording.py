"""Feeds a recording of the requests that one scheduler of vLLM serves."""

from __future__ import annotations

import logging
from collections.abc import Callable

from statecache.engine.faults import FaultBarrier, guarded
from statecache.engine.settings import Settings
from statecache.replay import online as shadow
from statecache.trace.recorder import Ended, Observer, TraceRecorder
from statecache_vllm.checkpoint_memory import dry_run_sizes, knows_states
from statecache_vllm.reporting import SchedulerReport
from statecache_vllm.views import KVCacheConfig, Request

__all__ = ["Recording", "begin"]

_log = logging.getLogger("statecache.vllm")


class Recording:
    """What the connector hears of requests. A request of embeddings has no tokens: left out.

    `hit_of` says what vLLM found in its cache for a request that is going to be admitted.
    """

    def __init__(
        self, recorder: TraceRecorder, faults: FaultBarrier, hit_of: Callable[[Request], int]
    ) -> None:
        self.faults = faults
        self._recorder = recorder
        self._hit_of = hit_of
        self._reused: dict[str, int] = {}

    def _stop(self, _: Request) -> None:
        self._recorder.stop("a request is not as expected")

    def _wants(self, request: Request) -> bool:
        has_tokens = request.prompt_token_ids is not None and request.prompt_embeds is None
        return self._recorder.recording and has_tokens

    @guarded(_stop)
    def arrived(self, request: Request) -> None:
        """A request was added."""
        if self._wants(request):
            self._recorder.arrived(request.request_id)

    @guarded(_stop)
    def admitted(self, request: Request) -> None:
        """A request is going to be prefilled; the first time counts."""
        self._reused.setdefault(request.request_id, self._hit_of(request))

    @guarded(_stop)
    def ended(self, request: Request) -> None:
        """A request ended."""
        cached_tokens = self._reused.pop(request.request_id, 0)
        if self._wants(request):
            self._recorder.ended(request.request_id, _ended(request, cached_tokens))

    def close(self) -> None:
        """Write what is left."""
        self._recorder.close()


def begin(
    settings: Settings,
    faults: FaultBarrier,
    report: SchedulerReport,
    kv_cache_config: KVCacheConfig,
) -> Recording | None:
    """Return a recording if the settings ask for one. Raises `SettingsError`."""
    observe = _shadow(settings, report, kv_cache_config) if settings.dry_run else None
    if settings.record is None and observe is None:
        return None
    recorder = TraceRecorder(settings.record, settings.record_mib, _log, observe=observe)
    return Recording(recorder, faults, report.hit_of)


def _shadow(
    settings: Settings, report: SchedulerReport, kv_cache_config: KVCacheConfig
) -> Observer | None:
    """Return what replays the requests beside the engine; the report shows the numbers."""
    if not knows_states(kv_cache_config):
        _log.warning("statecache: a checkpoint pool does not know this model's states: no dry run")
        return None
    slots, kv_tokens = dry_run_sizes(settings, kv_cache_config)
    replay, observe = shadow.begin(slots, kv_tokens, settings, _log)
    report.also = replay.sample
    return observe


def _ended(request: Request, cached_tokens: int = 0) -> Ended:
    """Return what is recorded of a `Request` of vLLM 0.32.

    It shares a block exactly where `generate_block_hash_extra_keys` lets vLLM share one.
    """
    lora = request.lora_request
    return Ended(
        request.prompt_token_ids or [],
        request.num_output_tokens,
        (request.cache_salt or None, *((lora.lora_name, lora.lora_path) if lora else ())),
        tuple(
            (item.mm_position.offset, item.mm_position.length, item.identifier)
            for item in request.mm_features
        ),
        request.session_id,
        cached_tokens,
    )
