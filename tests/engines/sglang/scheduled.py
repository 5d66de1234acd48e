"""Real SGLang requests against the cache layer, without a model."""

from __future__ import annotations

from array import array

from cache_layer import Traffic
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.sampling.sampling_params import SamplingParams

_made = iter(range(1_000_000))


def request(tokens: list[int], **more: str) -> Req:
    sampling = SamplingParams(max_new_tokens=1)
    made = Req(f"request-{next(_made)}", "", array("q", tokens), sampling, **more)
    made.sampling_params.normalize(None)
    return made


def admit(traffic: Traffic, tokens: list[int]) -> Req:
    """Match, lock and give slots, as the scheduler does with a request it admits."""
    made = request(tokens)
    made.init_next_round_input(traffic.cache)
    made.lock = traffic.cache.lock(made.last_node)
    rows = traffic.requests.alloc([made])
    assert rows is not None
    hit = made.prefix_len
    fresh = traffic.kv_slots(len(tokens) - hit)
    row = traffic.requests.req_to_token[made.kv.req_pool_idx]
    row[:hit] = traffic.cache.path_device_indices(made.last_node)[:hit]
    row[hit : len(tokens)] = fresh.to(row.dtype)
    return made


def adder(traffic: Traffic, chunk: int | None = None, page_size: int = 1) -> PrefillAdder:
    """What admits requests to the next step, with room for `chunk` tokens (None: any)."""
    return PrefillAdder(
        page_size=page_size,
        tree_cache=traffic.cache,
        token_to_kv_pool_allocator=traffic.allocator,
        running_batch=None,
        new_token_ratio=1.0,
        rem_input_tokens=1 << 20,
        rem_chunk_tokens=chunk,
    )


def ask(admission: PrefillAdder, req: Req) -> AddReqResult:
    """Ask for a request to be admitted."""
    return admission.add_one_req(req, has_chunked_req=False, truncation_align_size=None)


def finish(traffic: Traffic, req: Req, tokens: int) -> None:
    """End a request: its state at `tokens` is cached, its lock and row are given back."""
    req.finished_reason = object()
    traffic.cache.checkpoint(req, up_to=tokens)
    traffic.cache.unlock(req.lock)
    traffic.requests.free(req)


def release(traffic: Traffic, req: Req, tokens: int, *, cached: bool) -> None:
    """End a request of which so many tokens are computed, as SGLang does; cache them or not."""
    req.kv.kv_committed_len = req.kv.kv_allocated_len = tokens
    if cached:
        req.finished_reason = object()
    release_kv_cache(req, traffic.cache, checkpoint=cached)


def take_back(traffic: Traffic, req: Req) -> None:
    """What the scheduler does with a request that it matched and could not admit."""
    req.kv.mamba_cow_src_index = None
    req.kv.mamba_needs_clear = False
    if req.kv.holds_mamba:
        traffic.requests.mamba_allocator.free(req.kv.mamba_pool_idx.unsqueeze(-1))
        req.kv.mamba_pool_idx = None
