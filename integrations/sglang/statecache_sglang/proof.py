"""A matched state proves itself before a request gets it; what does not fit is no match.

The slot of each int8 checkpoint says which prefix its state is of. That is compared with the match
and, for the share `--statecache-verify`, so are the bytes with the sum that was taken when they
were stored. A state that fails is dropped, and its prompt computed.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from statecache.checkpoint.proof import Prefix
from statecache.engine.metrics import MetricKey
from statecache.engine.verification import note_errors
from statecache_sglang.scheduler_side import prefix_of, scheduler_side_of
from statecache_sglang.seams import slots as state_slots
from statecache_sglang.seams import tree
from statecache_sglang.steps import plugin_pool, read_all_reports

if TYPE_CHECKING:
    from statecache_sglang.checkpoints import CheckpointSlots
    from statecache_sglang.pool_views import Tensor
    from statecache_sglang.views import MatchParameters, MatchResult, Request, TreeCache

__all__ = ["prove", "record_store"]

_log = logging.getLogger("statecache.sglang")
_MAMBA = tree.mamba_type()
# The layers of a model of SGLang 0.5.23 that have states in slots are all of one kind.
_KIND = "temporal"


def record_store(cache: TreeCache, req: Request, depth: int) -> None:
    """The state of `req` after `depth` tokens was stored last: write that down in its slot."""
    slots = plugin_pool(cache)
    if slots is None or depth <= 0:
        return
    errors = slots.record(_prefix(req, depth))
    side = scheduler_side_of(cache)
    if errors is not None and side is not None:
        side.counts.add(MetricKey.VERIFIED_STORES.value)
        note_errors(side.counts, {_KIND: errors}, _log)


def prove(cache: TreeCache, params: MatchParameters, result: MatchResult) -> MatchResult | None:
    """Return this match if the state at its end is there, and that of the request's own prefix.

    One that is another's is counted and, unless a running request holds it, dropped. Where it is
    not known yet if it is there, the request is to wait (`statecache_unread`), for one step's
    stores in all: later on it gets what is known to be there, a shorter match or None. Without the
    extra buffer SGLang runs no batch meanwhile, and what is waited for at once is the copy alone.
    """
    req, slots = params.req, plugin_pool(cache)
    req.statecache_unread = False
    state = None if slots is None else _state(cache, result.best_match_node)
    if slots is None or state is None:
        return result
    step = slots.unread_since(state)
    if step is not None and cache.enable_mamba_extra_buffer:
        if getattr(req, "statecache_waits_for", None) in (None, step):
            req.statecache_unread, req.statecache_waits_for = True, step
            return None
        shorter = _known_match(cache, slots, result)
        return shorter if shorter is not None and _is_own(cache, slots, req, shorter) else None
    if step is not None and slots.numbers(state)[0] in read_all_reports(cache):
        return None
    return result if _is_own(cache, slots, req, result) else None


def _known_match(
    cache: TreeCache, slots: CheckpointSlots, result: MatchResult
) -> MatchResult | None:
    """Return the match that ends at the deepest state before its end that is known to be there."""

    def is_known(node: int) -> bool:
        state = _state(cache, node)
        return not (state is None or slots.was_refused(state)) and slots.unread_since(state) is None

    side = scheduler_side_of(cache)
    found = None if side is None else side.deepest_above(result.best_match_node, is_known)
    return None if found is None else tree.match_ending_earlier(result, *found)


def _is_own(cache: TreeCache, slots: CheckpointSlots, req: Request, result: MatchResult) -> bool:
    """Whether the state at the end of a match, whose report was read, is that of its prefix."""
    side, node = scheduler_side_of(cache), result.best_match_node
    state = _state(cache, node)
    if state is None or slots.was_refused(state):
        return False
    prefix = _prefix(req, result.device_prefix_len)
    what = slots.mismatch(state, prefix)
    if what is None and getattr(req, "statecache_compared", None) != (node, prefix):
        same = slots.compare_bytes(state)
        if same is not None and side is not None:
            side.counts.add(MetricKey.VERIFIED_RESTORES.value)
        what = "bytes" if same is False else None
        # A waiting request is matched again and again.
        req.statecache_compared = (node, prefix)
    if what is None:
        return True
    if side is not None:
        side.counts.add(MetricKey.RESTORE_MISMATCHES.of(what))
        side.faults.count(
            f"the state of node {node} is not what was to be restored ({what}): it is dropped and"
            " the prompt computed",
            takes_over=False,
        )
        if side.registry.condemn(node) and side.faults.active and not side.is_locked(node):
            state_slots.evict_checkpoint(cache)
    return False


def _state(cache: TreeCache, node: int) -> Tensor | None:
    return cache.tree_core.get_component_device_value(node, _MAMBA)


def _prefix(req: Request, depth: int) -> Prefix:
    return Prefix(prefix_of(req, depth).key, depth)
