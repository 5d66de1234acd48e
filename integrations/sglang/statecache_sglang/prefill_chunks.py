"""Where the chunks of a prompt end, and which of the states there are spare.

SGLang 0.5.23 caches a state at the end of every prefill chunk and of the prompt. Here a chunk is
made to end

- with the admission `branch-points` where the cached KV of the prompt ended: it parts there from
  what was cached before;
- where queued requests part from it that are to wait for that state (`head_waits`).

With that admission the state at any other chunk end is *spare*: it takes a free slot, and is the
first to go. One that a request resumes from counts as any other from then on. The chunk after a cut
ends where the one that was cut would have: nothing that SGLang alone keeps is missing.

With its extra buffer SGLang tracks one state inside a chunk (`mamba_branching_seqlen`), where the
cached KV ended by itself: no chunk is cut, and a head that others wait for is named to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from statecache_sglang.scheduler_side import SchedulerSide, scheduler_side_of
from statecache_sglang.seams import slots as state_slots
from statecache_sglang.views import (
    PrefillAdder,
    Request,
    TreeCache,
)

__all__ = [
    "comes_next",
    "continue_chunks",
    "cut_first_chunk",
    "fits_whole",
    "is_spare",
    "note_chunk",
]


def is_spare(cache: TreeCache, req: Request, tokens: int) -> bool:
    """Whether the state of a running request after so many tokens may only take a free slot."""
    side = scheduler_side_of(cache)
    if side is None or not (side.faults.active and side.registry.admits_branch_points):
        return False
    if tokens >= len(req.origin_input_ids):
        return False
    if cache.enable_mamba_extra_buffer:
        tracked = req.mamba_branching_seqlen
        return tracked is None or req.kv.mamba_last_track_seqlen != tracked
    return tokens not in getattr(req, "statecache_ends", ())


@contextmanager
def cut_first_chunk(adder: PrefillAdder, req: Request, *, alone: bool) -> Iterator[None]:
    """While `PrefillAdder.add_one_req` runs, have the first chunk of `req` end where it should.

    What is left of the budget of the step is for the next requests. As SGLang has it, only one at a
    time can be in the middle of its prompt: with `alone` none is.
    """
    side, budget = scheduler_side_of(adder.tree_cache), adder.rem_chunk_tokens
    req.statecache_ends, req.statecache_uncut_end = set(), 0
    if side is None or budget is None or not alone:
        yield
        return
    at = req.prefix_len + req.host_hit_length
    if side.registry.admits_branch_points:
        req.statecache_branch_point = getattr(req, "statecache_kv_tokens", 0)
    end = _next_end(side, adder.tree_cache, req, at, budget)
    if end is None:
        yield
        return
    adder.rem_chunk_tokens = end - at
    try:
        yield
    finally:
        adder.rem_chunk_tokens += budget - (end - at)


def continue_chunks(
    original: Callable[[PrefillAdder, Request], Request | None], adder: PrefillAdder, req: Request
) -> Request | None:
    """Around `PrefillAdder.add_chunked_req`: the next chunk ends where it should."""
    side, budget = scheduler_side_of(adder.tree_cache), adder.rem_chunk_tokens
    if side is None or budget is None:
        return original(adder, req)
    end = _next_end(side, adder.tree_cache, req, req.prefix_len, budget)
    if end is not None:
        limit = adder.chunked_req_limit
        tokens = end - req.prefix_len
        adder.chunked_req_limit = tokens if limit is None else min(limit, tokens)
    unfinished = original(adder, req)
    if adder.can_run_list and adder.can_run_list[-1] is req:
        note_chunk(side, adder.tree_cache, req)
    return unfinished


def _next_end(
    side: SchedulerSide, cache: TreeCache, req: Request, at: int, budget: int
) -> int | None:
    if cache.enable_mamba_extra_buffer:
        return None
    limit = min(at + budget, len(req.full_untruncated_fill_ids))
    cuts = (getattr(req, "statecache_branch_point", 0), side.cut(req, at, limit, 1) or 0)
    ends = [end for end in cuts if at < end < limit]
    if ends:
        req.statecache_ends = {*req.statecache_ends, *ends}
        if side.registry.admits_branch_points:
            req.statecache_uncut_end = limit
    uncut = req.statecache_uncut_end
    return min([*ends, *([uncut] if at < uncut < limit else [])], default=None)


def note_chunk(side: SchedulerSide, cache: TreeCache, req: Request) -> None:
    """The next chunk of `req` is going to be computed: others may wait for its state."""
    begin, end = req.prefix_len, req.extend_end
    if not cache.enable_mamba_extra_buffer:
        side.computing(req, begin, end)
        return
    grid = state_slots.checkpoint_grid(cache)
    tracked = req.mamba_branching_seqlen
    if not (tracked is not None and begin < tracked < end) and begin % grid == 0:
        head = side.cut(req, begin, end, grid)
        if head is not None:
            req.mamba_branching_seqlen = head
    side.computing(req, begin, state_slots.tracked_depth(cache, req))


def comes_next(side: SchedulerSide, adder: PrefillAdder, req: Request) -> bool:
    """Whether a request that others share a head with is left for a step in which it can be cut."""
    cache = adder.tree_cache
    if adder.rem_chunk_tokens is None or cache.enable_mamba_extra_buffer:
        return False
    return bool(side.comes_next(req))


def fits_whole(adder: PrefillAdder, req: Request) -> bool:
    """Whether the rest of the budget of a step takes all of a request's prompt."""
    page = adder.tree_cache.page_size
    tokens = len(req.full_untruncated_fill_ids) - req.prefix_len
    return adder.rem_chunk_tokens is None or -(-tokens // page) * page <= adder.rem_chunk_tokens
