"""What happens when every state slot is in use: caching is skipped, a request waits.

SGLang 0.5.23 asserts there, and the server dies. The asserts this file keeps from being reached
are those of `MambaComponent._alloc_mamba_slot` and `finalize_match_result_in_cache`
(components/mamba.py) and of `HybridReqToTokenPool.alloc` and `_alloc_ping_pong_buffer`
(memory_pool.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from statecache.engine.metrics import MetricKey
from statecache_sglang import prefill_chunks, proof, reporting, speculation, steps
from statecache_sglang.pool_views import Tensor
from statecache_sglang.scheduler_side import scheduler_side_of
from statecache_sglang.seams import scheduler, tree
from statecache_sglang.seams import slots as state_slots
from statecache_sglang.views import (
    InsertParameters,
    LoadBackParameters,
    MatchParameters,
    MatchResult,
    PrefillAdder,
    Request,
    TreeCache,
)

if TYPE_CHECKING:
    from statecache_sglang.engine_classes import MambaComponent
else:
    MambaComponent = tree.mamba_component()

_log = logging.getLogger("statecache.sglang")
_MAMBA = tree.mamba_type()


class SlotShortageMixin(MambaComponent):
    """SGLang's Mamba component, skipping what there is no slot for."""

    skipped = 0
    _reserved: Tensor | None = None
    _reserved_checkpoint: Tensor | None = None

    def skip(self, reason: str, what: str) -> None:
        """Count something that there was no slot for; log the first one."""
        self.skipped += 1
        self._count(reason)
        if self.skipped == 1:
            _log.warning("statecache: every state slot is in use: %s", what)

    def _count(self, reason: str) -> None:
        side = scheduler_side_of(self.cache)
        if side is not None:
            side.counts.add(MetricKey.SKIPS.of(reason))

    def prepare_for_caching_req(
        self, req: Request, insert_params: InsertParameters, token_ids_len: int, is_finished: bool
    ) -> int | None:
        """SGLang's, or 0 (nothing of the request is cached now) when there is no slot.

        All slots are taken before anything else is done, so there is nothing to undo. A state
        known not to be finite is not kept either. Nor is one of more tokens than its key, or than
        whole pages: SGLang cuts its key to pages, and the node would end before its state. A spare
        one takes the place of a spare one at most.
        """
        side = scheduler_side_of(self.cache)
        if side is not None:
            side.computed(req, token_ids_len)
        own_state = is_finished and not self.cache.enable_mamba_extra_buffer
        if own_state and speculation.is_past_stop(side, req, token_ids_len):
            return 0
        spare = not is_finished and prefill_chunks.is_spare(self.cache, req, token_ids_len)
        if spare and not self._has_room_for_spare():
            return 0
        try:
            if not self._reserve(req, is_finished):
                self.skip("not_cached", "this step of the request was not cached")
                return 0
            length = super().prepare_for_caching_req(req, insert_params, token_ids_len, is_finished)
        finally:
            self._give_back_reserved()
        if length and length % self.cache.page_size:
            self._count("off_page")
            return 0
        insert_params.statecache_namespace = scheduler.namespace_of(req)
        insert_params.statecache_spare = spare
        insert_params.statecache_end = is_finished or token_ids_len >= len(req.origin_input_ids)
        stored = insert_params.mamba_value
        if stored is None or length is None:
            return length
        proof.record_store(self.cache, req, length)
        insert_params.statecache_prefix = getattr(req, "statecache_prefix", None)
        checkpoints = steps.plugin_pool(self.cache)
        if checkpoints is not None and checkpoints.was_refused(stored):
            checkpoints.free(stored)
            insert_params.mamba_value = None
            self._count("not_finite")
            return 0
        return length

    def _has_room_for_spare(self) -> bool:
        pool = self.cache.req_to_token_pool
        checkpoints = self.int8_ckpt_pool
        if checkpoints is not None:
            free = int(checkpoints.available_size())
        else:
            free = state_slots.free_state_slots(pool.mamba_allocator)
        side = scheduler_side_of(self.cache)
        return free > 0 or (side is not None and bool(side.has_spare()))

    def _reserve(self, req: Request, is_finished: bool) -> bool:
        int8 = self.int8_ckpt_pool is not None
        tracked = self.cache.enable_mamba_extra_buffer
        if tracked and not is_finished and req.kv.mamba_last_track_seqlen is None:
            return True
        if int8:
            self._reserved_checkpoint = _or_none(super()._alloc_int8_ckpt_slot)
            if self._reserved_checkpoint is None:
                return False
        if not is_finished and (tracked or not int8):
            self._reserved = _or_none(super()._alloc_mamba_slot, *state_slots.allocating_for(req))
            return self._reserved is not None
        return True

    def _give_back_reserved(self) -> None:
        slot, self._reserved = self._reserved, None
        if slot is not None:
            self.cache.req_to_token_pool.mamba_allocator.free(slot)
        slot, self._reserved_checkpoint = self._reserved_checkpoint, None
        if slot is not None and self.int8_ckpt_pool is not None:
            self.int8_ckpt_pool.free(slot)

    def _alloc_mamba_slot(self, *req: Request) -> Tensor:
        slot, self._reserved = self._reserved, None
        return super()._alloc_mamba_slot(*req) if slot is None else slot

    def _alloc_int8_ckpt_slot(self) -> Tensor:
        slot, self._reserved_checkpoint = self._reserved_checkpoint, None
        return super()._alloc_int8_ckpt_slot() if slot is None else slot

    def finalize_match_result_in_cache(
        self, params: MatchParameters, result: MatchResult
    ) -> MatchResult:
        """SGLang's, or no match at all when the request can get no slot to copy the state to.

        A prefix without its state must not be reused, nor one whose state is not its own; a
        shorter one is where the state at its end is not known to be there, and one before it is.
        """
        if params.cow_mamba:
            proved = proof.prove(self.cache, params, result)
            if proved is None:
                params.req.kv.mamba_cow_src_index = None
                params.req.kv.mamba_needs_clear = params.req.kv.holds_mamba
                return self.tree_core.empty_match_result
            result = proved
        if params.cow_mamba and not params.req.kv.holds_mamba:
            params.req.statecache_kv_tokens = result.full_kv_hit_length
            node = result.best_match_node
            state = self.tree_core.get_component_device_value(node, _MAMBA)
            if state is not None and not self._make_room(node):
                self.skip("not_reused", "a matched prefix was not reused")
                return self.tree_core.empty_match_result
        return super().finalize_match_result_in_cache(params, result)

    def _make_room(self, node: int) -> bool:
        allocator = self.cache.req_to_token_pool.mamba_allocator
        if state_slots.free_state_slots(allocator) > 0:
            return True
        if self.int8_ckpt_pool is not None:
            return False  # cached states hold no slot of this pool
        lock = self.cache.inc_lock_ref(node)
        state_slots.evict_states(self.cache, 1)
        self.cache.dec_lock_ref(node, lock.to_dec_params())
        return state_slots.free_state_slots(allocator) > 0


def _or_none(alloc: Callable[..., Tensor], *args: object) -> Tensor | None:
    try:
        return alloc(*args)
    except AssertionError as error:
        if not any(text in str(error) for text in (state_slots.NO_SLOT, state_slots.NO_CHECKPOINT)):
            raise
        return None


def admit_all_or_none(
    original: Callable[..., object],
    adder: PrefillAdder,
    req: Request,
    has_chunked_req: bool,
    *args: object,
    **kwargs: object,
) -> object:
    """Around `PrefillAdder.add_one_req`: a request gets every state slot it needs, or waits.

    One that waits for the state of another is passed over, and so is one whose state is stored at
    this moment, once, for a step or two: nobody knows yet whether it was finite.
    """
    pool = adder.tree_cache.req_to_token_pool
    if not state_slots.is_hybrid_pool(pool) or adder.tree_cache.disable:
        return original(adder, req, has_chunked_req, *args, **kwargs)
    reporting.report(adder.tree_cache)
    side = scheduler_side_of(adder.tree_cache)
    unread = getattr(req, "statecache_unread", False)
    if unread or (side is not None and side.should_wait(adder, req)):
        state_slots.give_back_state(pool, req)
        return scheduler.go_on()
    alone = not has_chunked_req and adder.new_chunked_req is None
    if not alone and not prefill_chunks.fits_whole(adder, req):
        return scheduler.no_more()
    if not alone and side is not None and prefill_chunks.comes_next(side, adder, req):
        state_slots.give_back_state(pool, req)
        return scheduler.go_on()
    waiting = [*adder.can_run_list, req]
    needed = sum(state_slots.missing_state_slots(pool, request) for request in waiting)
    if req.mamba_host_hit_length > 0 and not req.kv.holds_mamba:
        needed += 1  # for the state that comes back to the tree
    free = state_slots.free_state_slots(pool.mamba_allocator)
    if needed > free:
        # As SGLang itself does a few lines on: the request's own prefix cannot make room.
        lock = adder.tree_cache.inc_lock_ref(req.last_node)
        cached_there = pool.mamba_ckpt_pool is None
        evictable = adder.tree_cache.mamba_evictable_size() if cached_there else 0
        adder.tree_cache.dec_lock_ref(req.last_node, lock.to_dec_params())
        if needed > free + evictable:
            return scheduler.no_room()
    with prefill_chunks.cut_first_chunk(adder, req, alone=alone):
        result = original(adder, req, has_chunked_req, *args, **kwargs)
    if adder.can_run_list and adder.can_run_list[-1] is req:
        req.statecache_waits_for = None
        speculation.begin(req)
        reporting.admitted(adder.tree_cache, req)
        if side is not None:
            side.admitted(adder.tree_cache, req)
            prefill_chunks.note_chunk(side, adder.tree_cache, req)
        if adder.new_chunked_req is req:
            return adder.budget_state()  # what the cut left can still be given
    return result


def load_back_or_wait(
    original: Callable[..., tuple[int, int] | None], cache: TreeCache, params: LoadBackParameters
) -> tuple[int, int] | None:
    """Around `UnifiedRadixCache.init_load_back`: a request never goes on without its state.

    A state that comes back takes two slots, of the tree and of the request; without both the
    request waits (None is "not now" to `PrefillAdder.add_one_req`). Where the load fails for
    another reason SGLang 0.5.23 goes on with the shorter prefix of the device but without the
    state at its end.
    """
    if not cache.supports_mamba():
        return original(cache, params)
    req, best = params.req, params.best_match_node
    core = cache.tree_core
    on_host = not req.kv.holds_mamba and core.component_has_host_value_only(best, _MAMBA)
    if on_host and not _two_slots(cache):
        component = cache.components[_MAMBA]
        if isinstance(component, SlotShortageMixin):
            component.skip("not_loaded_back", "a state on the host was not loaded back yet")
        return None
    loaded = original(cache, params)
    if on_host and loaded is not None and core.component_has_host_value_only(best, _MAMBA):
        return loaded if _copy_state(cache, loaded[1], req) else None
    return loaded


def _two_slots(cache: TreeCache) -> bool:
    allocator = cache.req_to_token_pool.mamba_allocator
    missing = 2 - state_slots.free_state_slots(allocator)
    if missing > 0:
        state_slots.evict_states(cache, missing)
    return state_slots.free_state_slots(allocator) >= 2


def _copy_state(cache: TreeCache, node: int, req: Request) -> bool:
    """Have the request start from the state of this node, as after a match that ended there."""
    if cache.tree_core.get_component_device_value(node, _MAMBA) is None:
        return True  # the root: there is nothing to start from
    params, match = tree.match_ending_at(cache.tree_core, node, req)
    cache.components[_MAMBA].finalize_match_result_in_cache(params, match)
    return bool(req.kv.holds_mamba)
