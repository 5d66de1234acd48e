"""Eviction by the state index on SGLang's Python tree core."""

from __future__ import annotations

from typing import Any

from statecache.engine.settings import Settings
from statecache_sglang import host_seams, pool_seams, seams
from statecache_sglang.learned_book import LearnedBook, is_end, new_book
from statecache_sglang.scheduler_side import Advisor, BackupLocks, StateBook
from statecache_sglang.slot_shortage import PatientMambaComponent
from statecache_sglang.unsupported import refuse_host_copies

_MAMBA = seams.mamba_type()
_MATCH_END = seams.match_end_phase()
_PythonCore: Any = seams.python_tree_core()


class IndexedMambaComponent(PatientMambaComponent):
    """SGLang's Mamba component with its device walk led by the state index.

    Where `attach` was never called (a subclass that skips `__init__`, the Rust core) every
    method behaves as SGLang's own.
    """

    _advisor: Advisor | None = None
    _inserting: Any = None  # the parameters of the insert that runs

    def attach(self, settings: Settings, slots: int) -> Advisor:
        """Let the index lead the walk from here on. The tree must still be empty."""
        self._advisor = Advisor(lambda: new_book(settings, self._below, slots))
        self.backups = BackupLocks()
        return self._advisor

    def _below(self, node_id: int, candidates: list[int]) -> list[int]:
        node = self.tree_core.node_by_id(node_id)
        found = []
        for candidate in candidates:
            above = self.tree_core.node_by_id(candidate).parent
            while above is not None and above is not node:
                above = above.parent
            if above is node:
                found.append(candidate)
        return found

    def _place(self, node: Any) -> tuple[int, list[int]]:
        """The depth of a node and the ids of the nodes above it, nearest first."""
        ancestors = []
        depth = 0
        at, root = node, self.tree_core.root_node
        while at is not root:
            depth += len(at.key)
            at = at.parent
            ancestors.append(at.id)
        return depth, ancestors

    def _put(self, book: StateBook, node: Any) -> None:
        depth, ancestors = self._place(node)
        if isinstance(book, LearnedBook) and self._inserting is not None:
            params = self._inserting
            book.name(node.id, params.key, depth, end=is_end(params))
        book.put(node.id, depth, ancestors, is_leaf=not node.children)

    def _left(self, book: StateBook, node: Any) -> None:
        if node.component_data[_MAMBA].host_value is None:
            book.gone(node.id)
        else:
            book.left_device(node.id, self._place(node)[0])

    def state_set(self, node_id: int) -> None:
        """A state was put on a node that was already in the tree."""
        if self._advisor is not None:
            node = self.tree_core.node_by_id(node_id)
            self._advisor.ask(self._put, self._advisor.book, node)

    def refresh_lru(self, phase: Any, node: Any, root_node: Any) -> None:
        """SGLang's, then a use of the state the match ended at."""
        super().refresh_lru(phase, node, root_node)
        if self._advisor is not None and phase == _MATCH_END:
            self._advisor.ask(self._advisor.book.use, node.id)

    def commit_insert_component_data(
        self, node: Any, is_new_leaf: bool, params: Any, result: Any, cache_actions: list[Any]
    ) -> None:
        """SGLang's, then the new state, or a use of the one that was there."""
        self._inserting = params
        try:
            super().commit_insert_component_data(node, is_new_leaf, params, result, cache_actions)
            if self._advisor is not None and (is_new_leaf or result.mamba_exist):
                self._advisor.ask(self._put, self._advisor.book, node)
        finally:
            self._inserting = None

    def evict_component(self, node: Any, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """SGLang's; every copy of a state leaves through here, whoever asked for it."""
        freed: tuple[int, int] = super().evict_component(node, *args, **kwargs)
        if self._advisor is not None and node.component_data[_MAMBA].value is None:
            self._advisor.ask(self._left, self._advisor.book, node)
        return freed

    def release_component_lock(self, node: Any, params: Any, lock_host: bool = False) -> None:
        """SGLang's, then a use when the last request let go of a state."""
        super().release_component_lock(node, params, lock_host)
        if self._advisor is None or lock_host:
            return
        if self.backups.last_request_left(node.id, node.component_data[_MAMBA].lock_ref):
            self._advisor.ask(self._advisor.book.released, node.id)

    def _evict_device_start(self, request_cnt: int) -> None:
        super()._evict_device_start(request_cnt)
        if self._advisor is not None:
            self._advisor.ask(self._advisor.book.begin_walk)

    def _is_locked(self, node_id: int) -> bool:
        return bool(self.tree_core.node_by_id(node_id).component_data[_MAMBA].lock_ref > 0)

    def _evict_device_next_node(
        self, tracker: Any, device_frees: Any, host_frees: Any, cache_actions: list[Any]
    ) -> Any:
        advisor = self._advisor
        victim = None
        if advisor is not None and advisor.active:
            if tracker[_MAMBA] >= self._evict_device_request_cnt:
                return None
            victim = advisor.ask(advisor.book.propose, self._is_locked)
        if victim is None:
            # No index, or it is silent: SGLang's own walk, which knows best what is left.
            return super()._evict_device_next_node(tracker, device_frees, host_frees, cache_actions)
        if seams.is_evictable_device_leaf(self.tree_core, victim):
            return victim
        if host_seams.wants_backup(self.tree_core, victim):
            return host_seams.backup_request(victim)  # and `finish_mamba_state_eviction` drops it
        seams.drop_internal_state(
            self.tree_core, self, victim, tracker, device_frees, host_frees, cache_actions
        )
        return None

    def _evict_device_end(self) -> None:
        super()._evict_device_end()
        if self._advisor is not None:
            self._advisor.ask(self._advisor.book.end_walk)


class IndexedPythonCore(_PythonCore):  # type: ignore[misc]
    """SGLang's Python tree core, telling its Mamba component what it cannot see itself."""

    advisor: Advisor | None = None

    def __init__(self, params: Any, components: Any, settings: Settings) -> None:
        super().__init__(params, components)
        self._settings = settings
        component = components[_MAMBA]
        if type(component) is IndexedMambaComponent:
            self.advisor = component.attach(settings, pool_seams.state_slots(params))

    def reset(self) -> None:
        """SGLang's, then an empty index."""
        super().reset()
        if self.advisor is not None:
            self.advisor.reset()
            self.components_by_type[_MAMBA].backups = BackupLocks()

    def set_component_device_value(self, node_id: int, component_type: Any, value: Any) -> None:
        """SGLang's, then the state that now sits on an existing node."""
        super().set_component_device_value(node_id, component_type, value)
        if component_type == _MAMBA and self.advisor is not None:
            self.components_by_type[_MAMBA].state_set(node_id)

    def set_hicache_enabled(self) -> None:
        """SGLang's, unless the states are in the int8 pool."""
        refuse_host_copies(self._settings)
        super().set_hicache_enabled()

    def evict_device_leaf(self, node_id: int, is_write_back: bool) -> Any:
        """SGLang's, then the node that is gone."""
        result = super().evict_device_leaf(node_id, is_write_back)
        if self.advisor is not None and isinstance(self.advisor.book, LearnedBook):
            self.advisor.ask(self._leaf_gone, self.advisor.book, node_id)
        return result

    def _leaf_gone(self, book: LearnedBook, node_id: int) -> None:
        try:
            self.node_by_id(node_id)
        except KeyError:
            book.node_gone(node_id)

    def mark_write_through_pending(self, node_ids: list[int], ack_id: int) -> Any:
        """SGLang's; a write-through holds a lock of its own."""
        if self.advisor is not None and not self.is_write_back:
            self.components_by_type[_MAMBA].backups.begin(ack_id)
        return super().mark_write_through_pending(node_ids, ack_id)

    def finish_write_through(self, node_ids: list[int], ack_id: int) -> None:
        """SGLang's; that lock is released next."""
        super().finish_write_through(node_ids, ack_id)
        if self.advisor is not None:
            self.components_by_type[_MAMBA].backups.end(ack_id)
