"""What SGLang builds for a model with a drafter: settings, cache, and what takes results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

from cache_layer import Traffic
from sglang.srt.managers.scheduler_components.batch_result_processor import (
    SchedulerBatchResultProcessor,
)
from sglang.srt.runtime_context import get_exec, get_spec

DRAFTS = 4  # tokens that a step verifies, the one that is certain included


BUFFERS = ("no_buffer", "extra_buffer", "extra_buffer_lazy")


@contextmanager
def speculating(buffer: str = "no_buffer", interval: int = 64) -> Iterator[None]:
    """Run with the settings that a server with a drafter has; the pools must be there."""
    mamba = {
        "enable_mamba_extra_buffer": buffer != "no_buffer",
        "enable_mamba_extra_buffer_lazy": buffer == "extra_buffer_lazy",
        "mamba_track_interval": interval,
    }
    drafts = {"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": DRAFTS}
    with ExitStack() as settings:
        settings.enter_context(get_exec().mamba.override(**mamba))
        settings.enter_context(get_spec().override(**drafts))
        yield


def build(core: str, buffer: str, page: int = 1, **sizes: int) -> Traffic:
    """A cache as SGLang builds it for a model with a drafter."""
    extra = buffer != "no_buffer"
    more = {
        "enable_mamba_extra_buffer_lazy": buffer == "extra_buffer_lazy",
        "enable_overlap_schedule": extra,
        "speculative_num_draft_tokens": DRAFTS,
    }
    sizes = {"slots": 48, "kv_tokens": 8_192, "longest": 4_096, **sizes}
    return Traffic(core, extra_buffer=extra, page_size=page, **more, **sizes)


def result_processor(traffic: Traffic, *, overlap: bool) -> SchedulerBatchResultProcessor:
    nothing = _Nothing()
    return SchedulerBatchResultProcessor(
        is_generation=True,
        disaggregation_mode=None,
        enable_overlap=overlap,
        enable_overlap_mlx=False,
        model_config=SimpleNamespace(self_opened_think_start_ids=(), think_end_ids=()),
        token_to_kv_pool_allocator=traffic.allocator,
        tree_cache=traffic.cache,
        hisparse_coordinator=None,
        req_to_token_pool=traffic.requests,
        decode_offload_manager=None,
        metrics_collector=nothing,
        metrics_reporter=nothing,
        draft_worker=None,
        model_worker=nothing,
        logprob_result_processor=nothing,
        output_streamer=nothing,
        beam_coordinator=nothing,
        abort_request=nothing,
    )


class _Nothing:
    """What reports a result to somebody: here to nobody."""

    num_generated_tokens = forward_ct_decode = 0

    def __getattr__(self, name: str):
        return self

    def __call__(self, *_: object, **__: object) -> None:
        return None
