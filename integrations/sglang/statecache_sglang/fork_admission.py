"""The admission `branch-points`: prompt ends, and where the cached KV of a prompt ended.

SGLang 0.5.23 caches a state at the end of every prefill chunk and of the prompt. With this
admission a chunk in the middle of a prompt is not cached (its KV comes with the next that is), but
where the KV of the prompt parts from what is cached: a first chunk is made to end there. With its
extra buffer SGLang tracks a state there by itself (`mamba_branching_seqlen`): no chunk is changed.

A fork beyond the first chunk gets no state: `add_chunked_req` decides where the later ones end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["chunk_ending_at_fork", "is_wanted"]


def _in_force(cache: Any) -> bool:
    advisor = getattr(cache.tree_core, "advisor", None)
    return advisor is not None and advisor.book.admission == "branch-points"


def is_wanted(cache: Any, req: Any, tokens: int) -> bool:
    """Whether the state of a running request after so many tokens is to be cached."""
    if not _in_force(cache) or tokens >= len(req.origin_input_ids):
        return True
    if cache.enable_mamba_extra_buffer:
        fork = req.mamba_branching_seqlen
        return fork is not None and req.kv.mamba_last_track_seqlen == fork
    return bool(tokens == getattr(req, "statecache_fork", None))


@contextmanager
def chunk_ending_at_fork(
    adder: Any, req: Any, has_chunked_req: bool = False, *_: Any, **__: Any
) -> Iterator[None]:
    """While `PrefillAdder.add_one_req` runs, have the first chunk of `req` end at its fork.

    Only one request at a time can be in the middle of its prompt, as SGLang has it.
    """
    cache = adder.tree_cache
    if not _in_force(cache) or cache.enable_mamba_extra_buffer:
        yield
        return
    limit = adder.rem_chunk_tokens
    fork = getattr(req, "statecache_kv_tokens", 0)
    first = fork - req.prefix_len
    free = limit is not None and not has_chunked_req and adder.new_chunked_req is None
    if not (free and 0 < first < limit and fork < len(req.full_untruncated_fill_ids)):
        yield
        return
    req.statecache_fork = fork
    adder.rem_chunk_tokens = first
    try:
        yield
    finally:
        if adder.new_chunked_req is not req:
            adder.rem_chunk_tokens = limit
