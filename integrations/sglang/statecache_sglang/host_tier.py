"""What SGLang's Rust tree core does with the host copies of states, with a hierarchical cache.

The Rust core says which slots of the host pool a step freed, not whose they were, so the slot of
each host copy is noted when it is made.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from statecache.engine.faults import FaultBarrier, advisory
from statecache.engine.settings import Settings
from statecache_sglang.pool_views import Tensor
from statecache_sglang.scheduler_side import BackupLocks, SchedulerSide
from statecache_sglang.seams import tree
from statecache_sglang.unsupported import refuse_host_copies
from statecache_sglang.views import (
    CacheParameters,
    ComponentType,
    EvictionStep,
    Transfer,
    Transfers,
)

if TYPE_CHECKING:
    from statecache_sglang.engine_classes import RustTreeCore
else:
    RustTreeCore = tree.rust_tree_core()

_MAMBA = tree.mamba_type()


class HostAwareRustCore(RustTreeCore):
    """SGLang's Rust tree core, telling which states left the device, the host or both."""

    scheduler_side: SchedulerSide
    faults: FaultBarrier  # of the scheduler's side: read at each call

    def __init__(self, params: CacheParameters, settings: Settings) -> None:
        super().__init__(params)
        self._settings = settings
        self._has_host = False
        self._start_over()

    def _start_over(self) -> None:
        # States on the device in the order of the native list, least recently used first.
        self._native_order: dict[int, None] = {}
        self._receipts: dict[int, object] = {}
        self._by_host_slot: dict[int, int] = {}
        self._backups = BackupLocks()

    def set_hicache_enabled(self) -> None:
        """SGLang's, unless the states are in the int8 pool."""
        refuse_host_copies(self._settings)
        super().set_hicache_enabled()
        self._has_host = True

    # What is left of a state.

    def _holds_state(self, node_id: int) -> bool:
        try:
            return self.get_component_device_value(node_id, _MAMBA) is not None
        except KeyError:
            return False

    def _depth_of(self, node_id: int) -> int:
        return self._binding.collect_path_info([node_id])[0][-1][3]

    def _is_on_host_alone(self, node_id: int) -> bool:
        try:
            return bool(self.component_has_host_value_only(node_id, _MAMBA))
        except KeyError:
            return False

    def _state_left_device(self, node_id: int) -> None:
        self._native_order.pop(node_id, None)
        self._receipts.pop(node_id, None)
        if self._has_host and self._is_on_host_alone(node_id):
            self.scheduler_side.registry.move_to_host(node_id, self._depth_of(node_id))
        else:
            self.scheduler_side.registry.drop(node_id)

    def _look_at(self, node_id: int) -> None:
        if not self._holds_state(node_id):
            self._state_left_device(node_id)

    @advisory
    def _look_at_all(self) -> None:
        for state in tuple(self._native_order):
            self._look_at(state)

    @advisory
    def _note_freed(self, step: EvictionStep, node_id: int | None = None) -> None:
        """Take note of what a step freed; a single state of the device was that of `node_id`."""
        freed = sum(map(len, step.device_frees.get(_MAMBA, ())))
        if freed == 1 and node_id is not None and node_id in self._native_order:
            self._state_left_device(node_id)
        elif freed:
            self._look_at_all()
        for slots in step.host_frees.get(_MAMBA, ()):
            for slot in slots.tolist():
                state = self._by_host_slot.pop(slot, None)
                if state is not None:
                    self._look_at(state)

    # Copies to the host.

    def commit_backup(self, node_id: int, host_indices: Tensor, comp_xfers: Transfers) -> None:
        """SGLang's, with the slot of the copy noted."""
        super().commit_backup(node_id, host_indices, comp_xfers)
        self._note_copies(node_id, comp_xfers.get(_MAMBA, ()))

    @advisory
    def _note_copies(self, node_id: int, transfers: Iterable[Transfer]) -> None:
        for transfer in transfers:
            for slot in transfer.host_indices.tolist():
                self._by_host_slot[slot] = node_id

    def mark_write_through_pending(self, node_ids: list[int], ack_id: int) -> object:
        """SGLang's; a write-through holds a lock of its own."""
        if not self.is_write_back:
            self._backups.begin(ack_id)
        return super().mark_write_through_pending(node_ids, ack_id)

    def finish_write_through(self, node_ids: list[int], ack_id: int) -> None:
        """SGLang's; that lock is released next."""
        super().finish_write_through(node_ids, ack_id)
        self._backups.end(ack_id)

    # States that leave the device, or the host.

    def demote(self, node_id: int) -> EvictionStep:
        """SGLang's, then the state that stays on the host alone."""
        result = super().demote(node_id)
        self._note_freed(result, node_id)
        return result

    def drop_subtree_no_host(self, node_id: int) -> EvictionStep:
        """SGLang's, then every state that went."""
        result = super().drop_subtree_no_host(node_id)
        self._note_freed(result, node_id)
        return result

    def drive_host_eviction(self, component_type: ComponentType, num_tokens: int) -> EvictionStep:
        """SGLang's, then every state whose last copy went."""
        result = super().drive_host_eviction(component_type, num_tokens)
        self._note_freed(result)
        return result

    def evict_device_leaf(self, node_id: int, is_write_back: bool) -> EvictionStep:
        """SGLang's, then the state that went with the leaf, and the node."""
        result = super().evict_device_leaf(node_id, is_write_back)
        self._note_freed(result, node_id)
        self._note_node_removed(node_id)
        return result

    @advisory
    def _note_node_removed(self, node_id: int) -> None:
        if not self.scheduler_side.registry.needs_prompts:
            return
        try:
            self.get_component_device_value(node_id, _MAMBA)
        except KeyError:
            self.scheduler_side.registry.drop_node(node_id)
