"""The admission `branch-points`: prompt ends, and where the cached KV of a prompt ended.

SGLang 0.5.23 caches a state at the end of every prefill chunk and of the prompt. With this
admission a chunk in the middle of a prompt is not cached (its KV comes with the next that is), but
where the KV of the prompt parts from what is cached: a first chunk is made to end there. With its
extra buffer SGLang tracks a state there by itself (`mamba_branching_seqlen`): no chunk is changed.

A branch point beyond the first chunk gets no state: `add_chunked_req` decides where the later
chunks end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from statecache_sglang.scheduler_side import scheduler_side_of
from statecache_sglang.views import (
    PrefillAdder,
    Request,
    TreeCache,
)

__all__ = ["chunk_ending_at_branch_point", "is_wanted"]


def _in_force(cache: TreeCache) -> bool:
    side = scheduler_side_of(cache)
    return side is not None and side.registry.admits_branch_points


def is_wanted(cache: TreeCache, req: Request, tokens: int) -> bool:
    """Whether the state of a running request after so many tokens is to be cached."""
    if not _in_force(cache) or tokens >= len(req.origin_input_ids):
        return True
    if cache.enable_mamba_extra_buffer:
        tracked = req.mamba_branching_seqlen
        return tracked is not None and req.kv.mamba_last_track_seqlen == tracked
    return bool(tokens == getattr(req, "statecache_branch_point", None))


@contextmanager
def chunk_ending_at_branch_point(
    adder: PrefillAdder,
    req: Request,
    has_chunked_req: object = False,
    *_args: object,
    **_kwargs: object,
) -> Iterator[None]:
    """While `PrefillAdder.add_one_req` runs, have the first chunk of `req` end at a branch point.

    Only one request at a time can be in the middle of its prompt, as SGLang has it.
    """
    cache = adder.tree_cache
    if not _in_force(cache) or cache.enable_mamba_extra_buffer:
        yield
        return
    limit = adder.rem_chunk_tokens
    branch_point = getattr(req, "statecache_kv_tokens", 0)
    first = branch_point - req.prefix_len
    prompt_tokens = len(req.full_untruncated_fill_ids)
    if (
        limit is None
        or has_chunked_req
        or adder.new_chunked_req is not None
        or not (0 < first < limit and branch_point < prompt_tokens)
    ):
        yield
        return
    req.statecache_branch_point = branch_point
    adder.rem_chunk_tokens = first
    try:
        yield
    finally:
        if adder.new_chunked_req is not req:
            adder.rem_chunk_tokens = limit
