"""Eviction by the state index on SGLang's Python tree core."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from statecache.engine.faults import FaultBarrier, advisory
from statecache.engine.settings import Settings
from statecache_sglang.pool_views import Tensor
from statecache_sglang.scheduler_side import BackupLocks, SchedulerSide, is_spare_insert
from statecache_sglang.seams import slots as state_slots
from statecache_sglang.seams import tree
from statecache_sglang.slot_shortage import SlotShortageMixin
from statecache_sglang.unsupported import refuse_host_copies
from statecache_sglang.views import (
    CacheParameters,
    ComponentType,
    EvictionStep,
    Frees,
    InsertParameters,
    InsertResult,
    LockParameters,
    Tracker,
    TreeNode,
)

if TYPE_CHECKING:
    from statecache_sglang.engine_classes import MambaComponent, PythonTreeCore
else:
    PythonTreeCore = tree.python_tree_core()

_MAMBA = tree.mamba_type()
_MATCH_END = tree.match_end_phase()


class IndexedMambaComponent(SlotShortageMixin):
    """SGLang's Mamba component with its device walk led by the state index.

    Where `attach` was never called (a subclass that skips `__init__`, the Rust core) every
    method behaves as SGLang's own.
    """

    faults: FaultBarrier | None = None
    _side: SchedulerSide
    _inserting: InsertParameters | None = None  # the parameters of the insert that runs

    def attach(self, settings: Settings, slots: int) -> SchedulerSide:
        """Let the index lead the walk from here on. The tree must still be empty."""
        self._side = SchedulerSide(
            settings, self._find_below, self._depth_of, self._is_locked, slots
        )
        self.faults = self._side.faults
        self.backups = BackupLocks()
        return self._side

    def _find_below(self, node_id: int, candidates: list[int]) -> list[int]:
        node = self.tree_core.node_by_id(node_id)
        found = []
        for candidate in candidates:
            above = self.tree_core.node_by_id(candidate).parent
            while above is not None and above is not node:
                above = above.parent
            if above is node:
                found.append(candidate)
        return found

    def _place(self, node: TreeNode) -> tuple[int, list[int]]:
        """The depth of a node and the ids of the nodes above it, nearest first."""
        ancestors = []
        depth = 0
        at, root = node, self.tree_core.root_node
        while at is not root:
            depth += len(at.key)
            at = at.parent
            ancestors.append(at.id)
        return depth, ancestors

    def _depth_of(self, node_id: int) -> int:
        return self._place(self.tree_core.node_by_id(node_id))[0]

    # What happened to the states.

    @advisory
    def _note_state(self, node: TreeNode) -> None:
        depth, ancestors = self._place(node)
        self._side.note_insert(node.id, self._inserting, depth)
        spare = is_spare_insert(self._inserting)
        self._side.registry.put(node.id, depth, ancestors, is_leaf=not node.children, spare=spare)

    @advisory
    def _note_state_left(self, node: TreeNode) -> None:
        if node.component_data[_MAMBA].host_value is None:
            self._side.registry.drop(node.id)
        else:
            self._side.registry.move_to_host(node.id, self._place(node)[0])

    @advisory
    def note_state_set(self, node_id: int) -> None:
        """A state was put on a node that was already in the tree."""
        self._note_state(self.tree_core.node_by_id(node_id))

    @advisory
    def _note_match(self, node: TreeNode) -> None:
        self._side.registry.on_match(node.id)

    @advisory
    def _note_release(self, node: TreeNode) -> None:
        self._side.registry.on_release(node.id)

    def refresh_lru(self, phase: object, node: TreeNode, root_node: TreeNode) -> None:
        """SGLang's, then a use of the state the match ended at."""
        super().refresh_lru(phase, node, root_node)
        if phase == _MATCH_END:
            self._note_match(node)

    def commit_insert_component_data(
        self,
        node: TreeNode,
        is_new_leaf: bool,
        params: InsertParameters,
        result: InsertResult,
        cache_actions: list[object],
    ) -> None:
        """SGLang's, then the new state, or a use of the one that was there."""
        self._inserting = params
        try:
            super().commit_insert_component_data(node, is_new_leaf, params, result, cache_actions)
            if is_new_leaf or result.mamba_exist:
                self._note_state(node)
        finally:
            self._inserting = None

    def evict_component(self, node: TreeNode, *args: object, **kwargs: object) -> tuple[int, int]:
        """SGLang's; every copy of a state leaves through here, whatever asked for it."""
        freed = super().evict_component(node, *args, **kwargs)
        if node.component_data[_MAMBA].value is None:
            self._note_state_left(node)
        return freed

    def release_component_lock(
        self, node: TreeNode, params: LockParameters, lock_host: bool = False
    ) -> None:
        """SGLang's, then a use when the last request let go of a state."""
        super().release_component_lock(node, params, lock_host)
        if self.faults is None or lock_host:
            return
        if self.backups.is_last_request(node.id, node.component_data[_MAMBA].lock_ref):
            self._note_release(node)

    # The walk.

    def _evict_device_start(self, request_cnt: int) -> None:
        super()._evict_device_start(request_cnt)
        self._begin_walk()

    @advisory
    def _begin_walk(self) -> None:
        self._side.registry.begin_walk()

    def _is_locked(self, node_id: int) -> bool:
        return bool(self.tree_core.node_by_id(node_id).component_data[_MAMBA].lock_ref > 0)

    @advisory
    def _choose_victim(self) -> int | None:
        return self._side.registry.next_victim(self._is_locked)

    def _evict_device_next_node(
        self, tracker: Tracker, device_frees: Frees, host_frees: Frees, **actions: list[object]
    ) -> object:
        manages = self.faults is not None and self.faults.active
        if manages and tracker[_MAMBA] >= self._evict_device_request_cnt:
            return None
        victim = self._choose_victim()
        if victim is None:
            # No index, or it is silent: SGLang's own walk, which knows best what is left.
            return super()._evict_device_next_node(tracker, device_frees, host_frees, **actions)
        if tree.is_evictable_device_leaf(self.tree_core, victim):
            return victim
        if tree.wants_backup(self.tree_core, victim):
            return tree.backup_request(victim)  # and `finish_mamba_state_eviction` drops it
        tree.drop_inner_state(
            self.tree_core, self, victim, tracker, device_frees, host_frees, **actions
        )
        return None

    def _evict_device_end(self) -> None:
        super()._evict_device_end()
        self._end_walk()

    @advisory
    def _end_walk(self) -> None:
        self._side.registry.end_walk()


class IndexedPythonCore(PythonTreeCore):
    """SGLang's Python tree core, telling its Mamba component what it cannot see itself."""

    scheduler_side: SchedulerSide | None = None

    def __init__(
        self,
        params: CacheParameters,
        components: Mapping[ComponentType, MambaComponent],
        settings: Settings,
    ) -> None:
        super().__init__(params, components)
        self._settings = settings
        component = components[_MAMBA]
        if type(component) is IndexedMambaComponent:
            self._component: IndexedMambaComponent = component
            self.scheduler_side = component.attach(settings, state_slots.state_capacity(params))

    @property
    def faults(self) -> FaultBarrier | None:
        """The barrier of the index; None where SGLang manages the states alone."""
        return None if self.scheduler_side is None else self.scheduler_side.faults

    def reset(self) -> None:
        """SGLang's, then an empty index."""
        super().reset()
        if self.scheduler_side is not None:
            self.scheduler_side.reset()
            self._component.backups = BackupLocks()

    def set_component_device_value(
        self, node_id: int, component_type: ComponentType, value: Tensor
    ) -> None:
        """SGLang's, then the state that now sits on an existing node."""
        super().set_component_device_value(node_id, component_type, value)
        if component_type == _MAMBA and self.scheduler_side is not None:
            self._component.note_state_set(node_id)

    def set_hicache_enabled(self) -> None:
        """SGLang's, unless the states are in the int8 pool."""
        refuse_host_copies(self._settings)
        super().set_hicache_enabled()

    def evict_device_leaf(self, node_id: int, is_write_back: bool) -> EvictionStep:
        """SGLang's, then the node that was removed."""
        result = super().evict_device_leaf(node_id, is_write_back)
        self._note_node_removed(node_id)
        return result

    @advisory
    def _note_node_removed(self, node_id: int) -> None:
        if self.scheduler_side is None or not self.scheduler_side.registry.needs_prompts:
            return
        try:
            self.node_by_id(node_id)
        except KeyError:
            self.scheduler_side.registry.drop_node(node_id)

    def mark_write_through_pending(self, node_ids: list[int], ack_id: int) -> object:
        """SGLang's; a write-through holds a lock of its own."""
        if self.scheduler_side is not None and not self.is_write_back:
            self._component.backups.begin(ack_id)
        return super().mark_write_through_pending(node_ids, ack_id)

    def finish_write_through(self, node_ids: list[int], ack_id: int) -> None:
        """SGLang's; that lock is released next."""
        super().finish_write_through(node_ids, ack_id)
        if self.scheduler_side is not None:
            self._component.backups.end(ack_id)
