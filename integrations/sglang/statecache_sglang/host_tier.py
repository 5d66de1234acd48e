"""What SGLang's Rust tree core does with the host copies of states, with a hierarchical cache.

The Rust core says which slots of the host pool a step freed, not whose they were, so the slot of
each host copy is noted when it is made.
"""

from __future__ import annotations

from typing import Any

from statecache.engine.settings import Settings
from statecache_sglang import seams
from statecache_sglang.learned_book import LearnedBook
from statecache_sglang.scheduler_side import Advisor, BackupLocks
from statecache_sglang.unsupported import refuse_host_copies

_MAMBA = seams.mamba_type()
_RustCore: Any = seams.rust_tree_core()


class HostAwareRustCore(_RustCore):  # type: ignore[misc]
    """SGLang's Rust tree core, telling which states left the device, the host or both."""

    advisor: Advisor

    def __init__(self, params: Any, settings: Settings) -> None:
        super().__init__(params)
        self._settings = settings
        self._has_host = False
        self._start_over()

    def _start_over(self) -> None:
        # States on the device in the order of the native list, least recently used first.
        self._native_order: dict[int, None] = {}
        self._receipts: dict[int, Any] = {}
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

    def _is_on_host_alone(self, node_id: int) -> bool:
        try:
            return bool(self.component_has_host_value_only(node_id, _MAMBA))
        except KeyError:
            return False

    def _left_device(self, node_id: int) -> None:
        self._native_order.pop(node_id, None)
        self._receipts.pop(node_id, None)
        if self._has_host and self._is_on_host_alone(node_id):
            depth = self._binding.collect_path_info([node_id])[0][-1][3]
            self.advisor.book.left_device(node_id, depth)
        else:
            self.advisor.book.gone(node_id)

    def _look_at(self, node_id: int) -> None:
        if not self._holds_state(node_id):
            self._left_device(node_id)

    def _look_at_all(self) -> None:
        for state in tuple(self._native_order):
            self._look_at(state)

    def _freed(self, step: Any, node_id: int | None = None) -> None:
        """Take note of what a step freed; a single state of the device was that of `node_id`."""
        freed = sum(map(len, step.device_frees.get(_MAMBA, ())))
        if freed == 1 and node_id in self._native_order:
            self._left_device(node_id)
        elif freed:
            self._look_at_all()
        for slots in step.host_frees.get(_MAMBA, ()):
            for slot in slots.tolist():
                state = self._by_host_slot.pop(slot, None)
                if state is not None:
                    self._look_at(state)

    # Copies to the host.

    def commit_backup(
        self, node_id: int, host_indices: Any, comp_xfers: dict[Any, list[Any]]
    ) -> None:
        """SGLang's, with the slot of the copy noted."""
        super().commit_backup(node_id, host_indices, comp_xfers)
        self.advisor.ask(self._copied, node_id, comp_xfers.get(_MAMBA, ()))

    def _copied(self, node_id: int, transfers: Any) -> None:
        for transfer in transfers:
            for slot in transfer.host_indices.tolist():
                self._by_host_slot[slot] = node_id

    def mark_write_through_pending(self, node_ids: list[int], ack_id: int) -> Any:
        """SGLang's; a write-through holds a lock of its own."""
        if not self.is_write_back:
            self._backups.begin(ack_id)
        return super().mark_write_through_pending(node_ids, ack_id)

    def finish_write_through(self, node_ids: list[int], ack_id: int) -> None:
        """SGLang's; that lock is released next."""
        super().finish_write_through(node_ids, ack_id)
        self._backups.end(ack_id)

    # States that leave the device, or the host.

    def demote(self, node_id: int) -> Any:
        """SGLang's, then the state that stays on the host alone."""
        result = super().demote(node_id)
        self.advisor.ask(self._freed, result, node_id)
        return result

    def drop_subtree_no_host(self, node_id: int) -> Any:
        """SGLang's, then every state that went."""
        result = super().drop_subtree_no_host(node_id)
        self.advisor.ask(self._freed, result, node_id)
        return result

    def drive_host_eviction(self, component_type: Any, num_tokens: int) -> Any:
        """SGLang's, then every state whose last copy went."""
        result = super().drive_host_eviction(component_type, num_tokens)
        self.advisor.ask(self._freed, result)
        return result

    def evict_device_leaf(self, node_id: int, is_write_back: bool) -> Any:
        """SGLang's, then the state that went with the leaf."""
        result = super().evict_device_leaf(node_id, is_write_back)
        self.advisor.ask(self._freed, result, node_id)
        if isinstance(self.advisor.book, LearnedBook):
            self.advisor.ask(self._leaf_gone, self.advisor.book, node_id)
        return result

    def _leaf_gone(self, book: LearnedBook, node_id: int) -> None:
        try:
            self.get_component_device_value(node_id, _MAMBA)
        except KeyError:
            book.node_gone(node_id)
