"""SGLang's own classes that the adapter extends, as a type checker sees them.

Where SGLang is there its class takes their place (`seams.tree`): nothing here is ever run.
"""
# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Mapping, Sequence

from statecache_sglang.pool_views import Checkpoints, Tensor
from statecache_sglang.views import (
    CacheParameters,
    ComponentType,
    EvictionStep,
    Frees,
    InsertParameters,
    InsertResult,
    InsertStep,
    Lock,
    LockParameters,
    MatchParameters,
    MatchResult,
    PythonCore,
    Request,
    RustBinding,
    RustCore,
    StateComponent,
    Tracker,
    Transfer,
    Transfers,
    TreeCache,
    TreeCore,
    TreeNode,
    WalkStep,
)

__all__ = ["MambaComponent", "PythonTreeCore", "RustTreeCore"]


class MambaComponent(StateComponent):
    """SGLang's component for recurrent states."""

    cache: TreeCache
    tree_core: PythonCore
    _evict_device_request_cnt: int

    @property
    def int8_ckpt_pool(self) -> Checkpoints | None: ...
    def refresh_lru(self, phase: object, node: TreeNode, root_node: TreeNode) -> None: ...
    def commit_insert_component_data(
        self,
        node: TreeNode,
        is_new_leaf: bool,
        params: InsertParameters,
        result: InsertResult,
        cache_actions: list[object],
    ) -> None: ...
    def evict_component(
        self, node: TreeNode, *args: object, **kwargs: object
    ) -> tuple[int, int]: ...
    def release_component_lock(
        self, node: TreeNode, params: LockParameters, lock_host: bool = False
    ) -> None: ...
    def prepare_for_caching_req(
        self, req: Request, insert_params: InsertParameters, token_ids_len: int, is_finished: bool
    ) -> int | None: ...
    def finalize_match_result_in_cache(
        self, params: MatchParameters, result: MatchResult
    ) -> MatchResult: ...
    def _alloc_mamba_slot(self, *req: Request) -> Tensor: ...
    def _alloc_int8_ckpt_slot(self) -> Tensor: ...
    def _evict_device_start(self, request_cnt: int) -> None: ...
    def _evict_device_next_node(
        self, tracker: Tracker, device_frees: Frees, host_frees: Frees, **actions: list[object]
    ) -> object: ...
    def _evict_device_end(self) -> None: ...


class _BothTreeCores(TreeCore):
    is_write_back: bool

    @property
    def empty_match_result(self) -> MatchResult: ...
    def reset(self) -> None: ...
    def get_component_device_value(
        self, node_id: int, component_type: ComponentType
    ) -> Tensor | None: ...
    def set_component_device_value(
        self, node_id: int, component_type: ComponentType, value: Tensor
    ) -> None: ...
    def component_has_host_value_only(
        self, node_id: int, component_type: ComponentType
    ) -> bool: ...
    def set_hicache_enabled(self) -> None: ...
    def evict_device_leaf(self, node_id: int, is_write_back: bool) -> EvictionStep: ...
    def mark_write_through_pending(self, node_ids: list[int], ack_id: int) -> object: ...
    def finish_write_through(self, node_ids: list[int], ack_id: int) -> None: ...


class PythonTreeCore(_BothTreeCores, PythonCore):
    """SGLang's tree core in Python."""

    root_node: TreeNode
    evictable_device_leaves: set[TreeNode]
    enable_hicache: bool

    def __init__(
        self, params: CacheParameters, components: Mapping[ComponentType, MambaComponent]
    ) -> None: ...
    def node_by_id(self, node_id: int) -> TreeNode: ...


class RustTreeCore(_BothTreeCores, RustCore):
    """SGLang's tree core in Rust."""

    tree_components: Sequence[ComponentType]
    _binding: RustBinding

    def __init__(self, params: CacheParameters) -> None: ...
    def is_root(self, node_id: int) -> bool: ...
    def match_prefix(self, params: MatchParameters) -> MatchResult: ...
    def begin_insert(self, params: InsertParameters) -> InsertStep: ...
    def resume_insert(self) -> InsertStep: ...
    def inc_lock_ref(
        self, node_id: int, skip_lock_components: Sequence[ComponentType] = ()
    ) -> Lock: ...
    def dec_lock_ref(
        self, node_id: int, params: LockParameters, skip_swa: bool = False
    ) -> object: ...
    def inc_full_pin(self, node_id: int) -> None: ...
    def dec_full_pin(self, node_id: int) -> None: ...
    def evict_device_start(self, component_type: ComponentType, request_cnt: int) -> None: ...
    def evict_device_next_node(
        self, component_type: ComponentType, tracker: Tracker
    ) -> WalkStep: ...
    def evict_device_end(self, component_type: ComponentType) -> None: ...
    def evict_excess_path_states(
        self, tail_node_id: int, device_frees: Frees, host_frees: Frees, cache_actions: list[object]
    ) -> None: ...
    def commit_backup(self, node_id: int, host_indices: Tensor, comp_xfers: Transfers) -> None: ...
    def commit_load_back(
        self, node_id: int, device_indices: Tensor, kv_xfer: Transfer, comp_xfers: Transfers
    ) -> list[object]: ...
    def finish_mamba_state_eviction(self, node_id: int) -> WalkStep: ...
    def demote(self, node_id: int) -> EvictionStep: ...
    def drop_subtree_no_host(self, node_id: int) -> EvictionStep: ...
    def drive_host_eviction(
        self, component_type: ComponentType, num_tokens: int
    ) -> EvictionStep: ...
