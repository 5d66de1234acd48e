"""Feeds a recording of the requests that one scheduler of vLLM serves."""

from __future__ import annotations

import logging
from typing import Any

from statecache.record import Ended, TraceRecorder
from statecache.settings import Settings
from statecache_vllm.guard import Guard

__all__ = ["Recording", "begin"]

_log = logging.getLogger("statecache.vllm")


class Recording:
    """What the connector hears of requests. A request of embeddings has no tokens: left out."""

    def __init__(self, recorder: TraceRecorder, guard: Guard) -> None:
        def fail(_request: Any) -> None:
            recorder.stop("a request is not as expected")

        def wanted(request: Any) -> bool:
            has_tokens = request.prompt_token_ids is not None and request.prompt_embeds is None
            return recorder.recording and has_tokens

        def arrived(request: Any) -> None:
            if wanted(request):
                recorder.arrived(request.request_id)

        def ended(request: Any) -> None:
            if wanted(request):
                recorder.ended(request.request_id, _ended(request))

        self.arrived = guard.wrap(arrived, fail)
        self.ended = guard.wrap(ended, fail)
        self.close = recorder.close


def begin(settings: Settings, guard: Guard) -> Recording | None:
    """Return a recording if the settings ask for one. Raises `SettingsError`."""
    if settings.record is None:
        return None
    return Recording(TraceRecorder(settings.record, settings.record_mib, _log), guard)


def _ended(request: Any) -> Ended:
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
    )
