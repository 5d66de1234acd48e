"""Eviction by the state index on SGLang's Rust tree core.

The Rust core cannot be told which state to drop. There are three ways to have it done:

- a victim without children goes by `evict_device_leaf`, which takes any evictable leaf;
- one with a single child and a state below it goes by `evict_excess_path_states`, which takes the
  states above a node, shallowest first, beyond a limit: the core is built with the limit 0, its
  own requests for that call are dropped, and the states above the victim are locked meanwhile;
- for any other, every unlocked state that the native walk would reach first is locked, and the
  walk makes one step: the walk takes the least recently used state that is not locked. With a
  hierarchical cache it may find a leaf (the children are on the host alone) or, with write-back,
  ask for a copy to the host first; that walk stays open until the copy is made.

Only states are locked, never their KV, and no lock outlives the call. SGLang 0.5.23 panics, and
its core is dead, when `evict_device_leaf` gets anything but an evictable leaf: what is locked is
therefore mirrored here.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from statecache.engine.faults import advisory
from statecache.engine.settings import Settings
from statecache_sglang.host_tier import HostAwareRustCore
from statecache_sglang.pool_views import Tensor
from statecache_sglang.scheduler_side import SchedulerSide, is_spare_insert
from statecache_sglang.seams import slots as state_slots
from statecache_sglang.seams import tree
from statecache_sglang.views import (
    CacheParameters,
    ComponentType,
    Frees,
    InsertParameters,
    InsertStep,
    Lock,
    LockParameters,
    MatchParameters,
    MatchResult,
    Tracker,
    Transfer,
    Transfers,
    WalkStep,
)

_MAMBA = tree.mamba_type()
_FULL = tree.full_type()


class _Victim(NamedTuple):
    """The state to drop; `below`: the state below it that its path can be cleared to."""

    node_id: int
    is_leaf: bool
    below: int | None


class IndexedRustCore(HostAwareRustCore):
    """SGLang's Rust tree core with its device walk over states led by the state index."""

    def __init__(self, params: CacheParameters, settings: Settings) -> None:
        # For lru the walk's own order is the right one, and nothing has to be locked.
        self._bindings = tree.path_clearing_bindings(unless=settings.policy == "lru")
        super().__init__(params, settings)
        self._clears_paths = self._bindings.applied
        slots = state_slots.state_capacity(params)
        self.scheduler_side = SchedulerSide(
            settings, self._find_below, self._depth_of, self._is_locked, slots
        )
        self.faults = self.scheduler_side.faults
        self._all_but_state = [int(c) for c in self.tree_components if c != _MAMBA]

    def _start_over(self) -> None:
        super()._start_over()
        self._state_locks: Counter[int] = Counter()
        self._kv_locks: Counter[int] = Counter()
        self._inserting: InsertParameters | None = None
        self._native_walk = False
        self._quota = 0

    def reset(self) -> None:
        """SGLang's, then an empty index."""
        super().reset()
        self.scheduler_side.reset()
        self._start_over()

    # What happened to the states.

    def _find_below(self, node_id: int, candidates: list[int]) -> list[int]:
        paths = self._binding.collect_path_info(candidates)
        return [
            candidate
            for candidate, path in zip(candidates, paths, strict=True)
            if any(node[0] == node_id for node in path[:-1])
        ]

    @advisory
    def _note_state(self, node_id: int) -> None:
        path = self._binding.collect_path_info([node_id])[0]
        _, _, _, depth, _, children = path[-1]
        nearest_first = (node[0] for node in reversed(path[:-1]))
        self.scheduler_side.note_insert(node_id, self._inserting, depth)
        spare = is_spare_insert(self._inserting)
        self.scheduler_side.registry.put(
            node_id, depth, nearest_first, is_leaf=children == 0, spare=spare
        )
        self._note_native_use(node_id)

    def _note_native_use(self, node_id: int) -> None:
        self._native_order.pop(node_id, None)
        self._native_order[node_id] = None

    @advisory
    def _note_match(self, node_id: int) -> None:
        if self.scheduler_side.registry.on_match(node_id) and node_id in self._native_order:
            self._note_native_use(node_id)

    @advisory
    def _note_release(self, node_id: int) -> None:
        self.scheduler_side.registry.on_release(node_id)

    def match_prefix(self, params: MatchParameters) -> MatchResult:
        """SGLang's, then a use of the state the match ended at."""
        result = super().match_prefix(params)
        self._note_match(result.best_match_node)
        return result

    def begin_insert(self, params: InsertParameters) -> InsertStep:
        """SGLang's, then the state this insert put, if it is through."""
        self._inserting = params if params.mamba_value is not None else None
        return self._note_insert_step(super().begin_insert(params))

    def resume_insert(self) -> InsertStep:
        """SGLang's, then the state this insert put, if it is through."""
        return self._note_insert_step(super().resume_insert())

    def _note_insert_step(self, step: InsertStep) -> InsertStep:
        while self._clears_paths and step.actions:
            tree.drop_path_requests(step.actions)
            if step.result is not None or step.actions:
                break
            step = super().resume_insert()  # nothing else was asked for
        result = step.result
        if result is None:
            return step
        declined = result.rotation_tail_declined or self.is_root(result.last_device_node)
        if self._inserting is not None and not declined:
            self._note_state(result.last_device_node)
        self._inserting = None
        return step

    def set_component_device_value(
        self, node_id: int, component_type: ComponentType, value: Tensor
    ) -> None:
        """SGLang's, then the state that now sits on an existing node."""
        super().set_component_device_value(node_id, component_type, value)
        if component_type == _MAMBA:
            self._note_state(node_id)

    def commit_load_back(
        self, node_id: int, device_indices: Tensor, kv_xfer: Transfer, comp_xfers: Transfers
    ) -> list[object]:
        """SGLang's, then the state that is back on the device."""
        actions = super().commit_load_back(node_id, device_indices, kv_xfer, comp_xfers)
        if _MAMBA in comp_xfers:
            self._note_state(node_id)
        return actions

    def evict_excess_path_states(
        self, tail_node_id: int, device_frees: Frees, host_frees: Frees, cache_actions: list[object]
    ) -> None:
        """SGLang's, then every state it took from the path."""
        super().evict_excess_path_states(tail_node_id, device_frees, host_frees, cache_actions)
        self._look_at_all()

    # Locks.

    def inc_lock_ref(
        self, node_id: int, skip_lock_components: Sequence[ComponentType] = ()
    ) -> Lock:
        """SGLang's, counted."""
        result = super().inc_lock_ref(node_id, skip_lock_components)
        if _FULL not in skip_lock_components:
            self._kv_locks[node_id] += 1
        if _MAMBA not in skip_lock_components:
            self._state_locks[node_id] += 1
        return result

    def dec_lock_ref(self, node_id: int, params: LockParameters, skip_swa: bool = False) -> object:
        """SGLang's, counted; a use when the last request let go of a state."""
        result = super().dec_lock_ref(node_id, params, skip_swa)
        if _FULL not in params.skipped_lock_components:
            self._drop_lock(self._kv_locks, node_id)
        if _MAMBA not in params.skipped_lock_components:
            left = self._drop_lock(self._state_locks, node_id)
            if self._backups.is_last_request(node_id, left):
                self._note_release(node_id)
        return result

    def inc_full_pin(self, node_id: int) -> None:
        """SGLang's, counted."""
        super().inc_full_pin(node_id)
        self._kv_locks[node_id] += 1

    def dec_full_pin(self, node_id: int) -> None:
        """SGLang's, counted."""
        super().dec_full_pin(node_id)
        self._drop_lock(self._kv_locks, node_id)

    @staticmethod
    def _drop_lock(locks: Counter[int], node_id: int) -> int:
        left = locks[node_id] - 1
        if left > 0:
            locks[node_id] = left
        else:
            del locks[node_id]
        return left

    # The walk.

    def evict_device_start(self, component_type: ComponentType, request_cnt: int) -> None:
        """Open the index's walk over states; any other walk is SGLang's."""
        if component_type != _MAMBA:
            super().evict_device_start(component_type, request_cnt)
            return
        self._quota = request_cnt
        self._begin_walk()

    @advisory
    def _begin_walk(self) -> None:
        self.scheduler_side.registry.begin_walk()

    def evict_device_next_node(self, component_type: ComponentType, tracker: Tracker) -> WalkStep:
        """One step: a leaf for the caller to drop, or one inner state dropped here."""
        if component_type != _MAMBA:
            return super().evict_device_next_node(component_type, tracker)
        if self.faults.active and tracker[_MAMBA] >= self._quota:
            return tree.no_step()
        victim = self._choose_victim()
        if victim is None:
            # The index is silent: SGLang's own walk, which knows best what is left.
            return self._native_step(tracker)
        if victim.is_leaf:
            return tree.leaf_step(victim.node_id)
        return self._drop_inner(victim, tracker)

    def _native_step(self, tracker: Tracker) -> WalkStep:
        if not self._native_walk:
            super().evict_device_start(_MAMBA, self._quota)
            self._native_walk = True
        return super().evict_device_next_node(_MAMBA, tracker)

    def evict_device_end(self, component_type: ComponentType) -> None:
        """End the walk."""
        if component_type != _MAMBA:
            super().evict_device_end(component_type)
            return
        self._end_walk()
        self._end_native_walk()

    @advisory
    def _end_walk(self) -> None:
        self.scheduler_side.registry.end_walk()

    def _end_native_walk(self) -> None:
        if self._native_walk:
            self._native_walk = False
            super().evict_device_end(_MAMBA)

    def _is_locked(self, node_id: int) -> bool:
        return node_id in self._state_locks

    @advisory
    def _choose_victim(self) -> _Victim | None:
        registry = self.scheduler_side.registry
        node_id = registry.next_victim(self._is_locked)
        if node_id is None:
            return None
        if self._clears_paths and not self.is_write_back:
            below = registry.next_below(node_id)
            if below is not None:
                return _Victim(node_id, is_leaf=False, below=below)
        _, _, _, _, kv_length, children = self._binding.collect_path_info([node_id])[0][-1]
        is_leaf = children == 0 and kv_length is not None and node_id not in self._kv_locks
        return _Victim(node_id, is_leaf, None)

    def _drop_inner(self, victim: _Victim, tracker: Tracker) -> WalkStep:
        step = None
        if victim.below is not None:
            step = self._clear_path(victim.node_id, victim.below)
        if step is None:  # a path is not cleared where it forks
            step = self._walk_to(victim.node_id, tracker)
        if step.node_id is None and step.mamba_backup_node_id is None:
            self._note_inner_drop(victim.node_id, step)
        return step

    def _clear_path(self, victim: int, below: int) -> WalkStep | None:
        step = tree.inner_step()
        held: list[int] = []
        try:
            self._hold_above(victim, held)
            super().evict_excess_path_states(
                below, step.device_frees, step.host_frees, step.cache_actions
            )
        finally:
            self._release_held(held)
        freed = sum(len(freed) for freed in step.device_frees.get(_MAMBA, ()))
        if freed:
            step.tracker[_MAMBA] = freed
            return step
        step.device_frees.clear()
        return None

    def _walk_to(self, victim: int, tracker: Tracker) -> WalkStep:
        self._end_native_walk()
        held: list[int] = []
        try:
            self._hold_older(victim, held)
            step = self._native_step(tracker)
        finally:
            self._release_held(held)
        if step.mamba_backup_node_id is None:
            self._end_native_walk()
        return step

    def finish_mamba_state_eviction(self, node_id: int) -> WalkStep:
        """SGLang's, for the native walk that asked for the copy; then the state that went."""
        step = super().finish_mamba_state_eviction(node_id)
        self._end_native_walk()
        self._note_freed(step, node_id)
        return step

    @advisory
    def _hold_above(self, victim: int, held: list[int]) -> None:
        self._hold(self.scheduler_side.registry.above(victim), held)

    @advisory
    def _hold_older(self, victim: int, held: list[int]) -> None:
        self._hold(itertools.takewhile(lambda state: state != victim, self._native_order), held)

    def _hold(self, states: Iterable[int], held: list[int]) -> None:
        for state in states:
            if state not in self._state_locks:
                self._binding.inc_lock_ref(state, self._all_but_state)
                held.append(state)

    def _release_held(self, held: list[int]) -> None:
        for state in held:
            self._binding.dec_lock_ref(state, self._receipt(state), False)

    @advisory
    def _note_inner_drop(self, victim: int, step: WalkStep) -> None:
        if self._holds_state(victim):
            self.faults.count(f"SGLang's walk did not take state {victim}", takes_over=False)
            self._look_at_all()
        else:
            self._note_freed(step, victim)

    def _receipt(self, node_id: int) -> object:
        receipt = self._receipts.get(node_id)
        if receipt is None:
            receipt = tree.state_lock_receipt(self._bindings, node_id, self._all_but_state)
            self._receipts[node_id] = receipt
        return receipt
