"""What statecache reads of the objects of SGLang 0.5.23, as types.

A `Protocol` is a view of one class of SGLang: what stands in it is read or called, and nothing
else is. `seam_table` says of which class, so that a renamed attribute is found before a request
fails. Names that begin with `statecache_` are ours, set on an object of SGLang.

Slots and indices are int64 tensors. Lengths and depths are tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from statecache_sglang.pool_views import Checkpoints, RequestKv, RequestPool, Tensor

if TYPE_CHECKING:  # the tables must load where the native index does not
    from statecache.checkpoint.proof import Prefix
    from statecache.index.keyed_index import PrefixKey


class ComponentType(Protocol):
    """The name of a component of a cache: attention KV, sliding window, recurrent state."""

    name: str

    def __int__(self) -> int: ...


Frees = dict[ComponentType, list[Tensor]]
Tracker = dict[ComponentType, int]  # how much was freed of each component


class ServerArguments(Protocol):
    """The arguments of a server; all but the first are refused, read by name (`unsupported`)."""

    enable_hierarchical_cache: bool
    disable_radix_cache: object
    radix_cache_backend: object
    hicache_storage_backend: object
    hicache_host_memory_mode: object
    enable_lmcache: object
    enable_flexkv: object
    enable_unified_cache_external_linker: object
    enable_session_radix_cache: object
    enable_streaming_session: object
    enable_unified_memory: object
    pp_size: object
    dp_size: object
    disaggregation_mode: object
    enable_multi_layer_eagle: object
    enable_linear_replayssm_spec: object


# Requests.


class Session(Protocol):
    """A streaming session."""

    session_id: str


class Request(Protocol):
    """A request of the scheduler.

    `statecache_kv_tokens`: how far its KV was resident when it was matched last.
    `statecache_branch_point`: how far it was when the request was admitted, with that admission.
    `statecache_ends`: where its chunks are made to end.
    `statecache_passed_over`: whether it was left for a step in which a chunk of it can be cut.
    `statecache_uncut_end`: where the last chunk that was cut would have ended.
    `statecache_prefix`: the key of what it was last matched with, or left a state of.
    `statecache_compared`: the node, and that prefix, whose bytes were compared last for it.
    `statecache_verified_tokens`: of how many tokens its state is since its last verify step.
    `statecache_unread`: whether it waits, as the state it was last matched with is being stored.
    `statecache_waits_for`: the step in which the first such state was stored, since it is queued.
    """

    kv: RequestKv
    prefix_len: int
    host_hit_length: int
    extend_end: int
    last_node: int
    origin_input_ids: Sequence[int]
    full_untruncated_fill_ids: Sequence[int]
    mamba_branching_seqlen: int | None
    mamba_host_hit_length: int
    extra_key: str | None
    cache_salt: str | None
    lora_id: str | None
    return_logprob: bool
    skip_radix_cache_insert: bool
    to_finish: object
    session: Session | None
    session_id: str | None
    input_embeds: object
    positional_embed_overrides: object
    cached_tokens: int
    output_ids: Sequence[int]
    is_retracted: bool
    statecache_verified_tokens: int
    statecache_kv_tokens: int
    statecache_branch_point: int
    statecache_prefix: PrefixKey
    statecache_compared: tuple[int, Prefix]
    statecache_unread: bool
    statecache_waits_for: int | None
    statecache_ends: set[int]
    statecache_uncut_end: int
    statecache_passed_over: bool

    @property
    def output_ids_through_stop(self) -> Sequence[int]: ...
    def finished(self) -> bool: ...
    def owned_kv_len(self) -> int: ...


class PrefillAdder(Protocol):
    """What puts requests into the next prefill batch."""

    tree_cache: TreeCache
    can_run_list: list[Request]
    rem_chunk_tokens: int | None
    new_chunked_req: Request | None
    chunked_req_limit: int | None

    def budget_state(self) -> object: ...


class SchedulePolicy(Protocol):
    """What sorts the queue before a prefill batch is made."""

    tree_cache: TreeCache


class Scheduler(Protocol):
    """The scheduler of one rank."""

    req_to_token_pool: RequestPool
    max_total_num_tokens: int


class VerifyResult(Protocol):
    """What a verify step of speculative decoding found, for the requests of one batch."""

    num_correct_drafts_per_req_cpu: Sequence[int]
    num_non_draft_tokens_per_req: int
    speculative_num_draft_tokens: int | None


class DecodeBatch(Protocol):
    """The requests of one step."""

    reqs: Sequence[Request]


class ResultProcessor(Protocol):
    """What takes the results of a step into its requests."""

    tree_cache: TreeCache


class InvariantChecker(Protocol):
    """What checks the pools whenever the scheduler is idle."""

    tree_cache: TreeCache

    def _requests_owning_rows(self) -> Sequence[Request]: ...


# The cache and what its calls take and return.


class CacheParameters(Protocol):
    """The parameters of a cache that is about to be built."""

    disable: bool
    req_to_token_pool: RequestPool
    tree_components: Sequence[ComponentType]
    enable_session_radix_cache: bool
    component_registry_override: object


class RadixKey(Protocol):
    """The tokens of a prefix, and the namespace that keeps it apart from others."""

    token_ids: Sequence[int]
    extra_key: str | None
    cache_salt: str | None

    def __len__(self) -> int: ...


class LockParameters(Protocol):
    """The receipt of a lock, for its release."""

    skipped_lock_components: Sequence[ComponentType]


class Lock(Protocol):
    """A lock that was taken."""

    def to_dec_params(self) -> LockParameters: ...


class MatchParameters(Protocol):
    """What is looked for: with `cow_mamba` the request gets a copy of the state."""

    cow_mamba: bool
    req: Request


class MatchResult(Protocol):
    """What was found: the node to resume from, and how far KV is resident."""

    best_match_node: int
    last_device_node: int
    last_host_node: int
    device_prefix_len: int
    full_kv_hit_length: int


class InsertParameters(Protocol):
    """A prefix that is cached, with the slot of the state at its end.

    `statecache_end`: whether it is the end of a prompt or of a request, and not of a chunk.
    `statecache_spare`: whether its state is the first to go. `statecache_namespace`: the
    name of its namespace. `statecache_prefix`: its key, if it was hashed before.
    """

    key: RadixKey
    mamba_value: Tensor | None
    statecache_end: bool
    statecache_namespace: bytes
    statecache_prefix: PrefixKey | None
    statecache_spare: bool


class InsertResult(Protocol):
    """What became of it."""

    mamba_exist: bool
    last_device_node: int
    rotation_tail_declined: bool


class InsertStep(Protocol):
    """One step of an insert; the last one has a result."""

    actions: list[object]
    result: InsertResult | None


class EvictionStep(Protocol):
    """What a step of an eviction freed, by component."""

    device_frees: Frees
    host_frees: Frees
    tracker: Tracker


class WalkStep(EvictionStep, Protocol):
    """One step of a walk: a leaf for the caller to drop, or a state to be copied first, or none."""

    node_id: int | None
    mamba_backup_node_id: int | None


class InnerStep(WalkStep, Protocol):
    """A step that drops an inner state, with what the cache is to do besides."""

    cache_actions: list[object]


class LoadBackParameters(Protocol):
    """A prefix of the host that a request wants back."""

    req: Request
    best_match_node: int


class Transfer(Protocol):
    """One copy between device and host."""

    host_indices: Tensor


Transfers = dict[ComponentType, list[Transfer]]


class TreeCache(Protocol):
    """The prefix cache of a scheduler."""

    disable: bool
    page_size: int
    enable_mamba_extra_buffer: bool
    req_to_token_pool: RequestPool
    tree_core: TreeCore
    components: Mapping[ComponentType, StateComponent]

    def supports_mamba(self) -> bool: ...
    def inc_lock_ref(self, node: int) -> Lock: ...
    def dec_lock_ref(self, node: int, params: LockParameters) -> object: ...
    def mamba_evictable_size(self) -> int: ...
    def mamba_protected_size(self) -> int: ...
    def evict_for_alloc(self, params: object) -> object: ...
    def evict(self, params: object) -> object: ...


# The tree of a cache.


class ComponentData(Protocol):
    """What a node of the Python tree holds of one component."""

    value: Tensor | None
    host_value: Tensor | None
    lock_ref: int


class TreeNode(Protocol):
    """A node of the Python tree."""

    id: int
    key: RadixKey
    parent: TreeNode
    children: Mapping[object, TreeNode]
    component_data: Mapping[ComponentType, ComponentData]

    @property
    def backuped(self) -> bool: ...


class TreeCore(Protocol):
    """What both tree cores have."""

    is_write_back: bool

    @property
    def empty_match_result(self) -> MatchResult: ...
    def get_component_device_value(
        self, node_id: int, component_type: ComponentType
    ) -> Tensor | None: ...
    def component_has_host_value_only(
        self, node_id: int, component_type: ComponentType
    ) -> bool: ...


class PythonCore(TreeCore, Protocol):
    """What the Python core has beside that."""

    root_node: TreeNode
    evictable_device_leaves: set[TreeNode]
    enable_hicache: bool

    def node_by_id(self, node_id: int) -> TreeNode: ...


class StateComponent(Protocol):
    """The component of a cache for recurrent states."""

    cache: TreeCache
    tree_core: PythonCore
    _evict_device_request_cnt: int

    @property
    def int8_ckpt_pool(self) -> Checkpoints | None: ...
    def finalize_match_result_in_cache(
        self, params: MatchParameters, result: MatchResult
    ) -> MatchResult: ...


# Of a node on a path: id, parent, first and last depth, length of its KV (None: on the host alone),
# children.
PathNode = tuple[int, int, int, int, int | None, int]


class RustBinding(Protocol):
    """The native object behind the Rust core."""

    def collect_path_info(self, node_ids: Sequence[int]) -> Sequence[Sequence[PathNode]]: ...
    def inc_lock_ref(self, node_id: int, skipped: Sequence[int]) -> object: ...
    def dec_lock_ref(self, node_id: int, receipt: object, skip_swa: bool) -> object: ...


class RustCore(TreeCore, Protocol):
    """What the Rust core has beside what both have."""

    tree_components: Sequence[ComponentType]
    _binding: RustBinding
