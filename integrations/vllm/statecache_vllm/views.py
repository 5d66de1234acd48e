"""What the adapter reads of vLLM's objects: the attributes of each, as types to annotate with.

vLLM is not imported here, and nothing is an instance of these classes at run time: the table
`VIEWS` of `seam_table` says which class of vLLM each one describes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

__all__ = [
    "AuxOutputConfig",
    "BlockMap",
    "BlockPool",
    "BoundaryStates",
    "CacheConfig",
    "CompilationConfig",
    "ConnectorOutput",
    "Coordinator",
    "EngineArgs",
    "FoundBlocks",
    "FreeQueue",
    "KVCacheBlock",
    "KVCacheBlocks",
    "KVCacheConfig",
    "KVCacheGroup",
    "KVCacheManager",
    "KVCacheSpec",
    "LoraRequest",
    "MambaSpec",
    "MetricsCollector",
    "ModelConfig",
    "ParallelConfig",
    "Request",
    "Scheduler",
    "SchedulerOutput",
    "SpeculativeConfig",
    "SingleTypeManager",
    "StateManager",
    "Tensor",
    "TransferConfig",
    "VllmConfig",
    "Worker",
]

# Tensors and other things of torch, which is the engine's and has no types here.
Tensor = Any


class KVCacheBlock(Protocol):
    """One block of the pool."""

    block_id: int
    block_hash: bytes | None
    ref_cnt: int
    is_null: bool
    prev_free_block: KVCacheBlock | None
    next_free_block: KVCacheBlock | None


class FreeQueue(Protocol):
    """Blocks that no request uses, the next one to go first."""

    @property
    def num_free_blocks(self) -> int:
        """How many blocks are free."""

    def popleft(self) -> KVCacheBlock:
        """Take the first block."""

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Take the first blocks."""

    def remove(self, block: KVCacheBlock) -> None:
        """Take a block out."""

    def append(self, block: KVCacheBlock) -> None:
        """Put a block last."""

    def append_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Put blocks last."""

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Put blocks first."""

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """Return all blocks in order."""

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        """Yield the blocks behind one."""


class BlockMap(Protocol):
    """Which block holds what, by key."""

    def get_one_block(self, key: bytes) -> KVCacheBlock | None:
        """Return a block that is cached under the key."""

    def contain(self, key: bytes, block_id: int) -> bool:
        """Whether this block is cached under the key."""

    def insert(self, key: bytes, block: KVCacheBlock) -> None:
        """Cache a block under a key."""

    def pop(self, key: bytes, block_id: int) -> KVCacheBlock | None:
        """Take a block out."""

    def __len__(self) -> int:
        """Return how many keys are cached."""


class MetricsCollector(Protocol):
    """What vLLM counts of blocks, where that was asked for."""

    def on_block_accessed(self, block: KVCacheBlock) -> None:
        """A block was used."""


class BlockPool(Protocol):
    """All blocks of one scheduler."""

    blocks: list[KVCacheBlock]
    null_block: KVCacheBlock
    num_gpu_blocks: int
    hash_block_size: int
    free_block_queue: FreeQueue
    cached_block_hash_to_block: BlockMap
    cached_block_hashes_by_block: dict[int, set[bytes]]
    metrics_collector: MetricsCollector | None

    def get_num_free_blocks(self) -> int:
        """Return how many blocks no request uses."""

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Hand out free blocks."""

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Take blocks back."""

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Use cached blocks."""

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Forget what these blocks hold."""

    def reset_prefix_cache(self) -> bool:
        """Forget what all blocks hold."""

    def cache_full_blocks(
        self,
        request: Request,
        blocks: Sequence[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
    ) -> None:
        """Name blocks by what they hold."""


class SingleTypeManager(Protocol):
    """The blocks of one kind of layer."""

    block_size: int


class StateManager(SingleTypeManager, Protocol):
    """The blocks of one group of recurrent layers."""

    cached_blocks_this_step: set[bytes]


class Coordinator(Protocol):
    """The managers of all kinds of layers."""

    single_type_managers: tuple[SingleTypeManager, ...]

    def find_longest_cache_hit_per_group(
        self, block_hashes: Sequence[bytes], max_cache_hit_length: int
    ) -> tuple[Sequence[Sequence[KVCacheBlock]], Sequence[int]]:
        """Return the blocks and the tokens of each group's own longest hit."""


class KVCacheBlocks(Protocol):
    """The blocks of a request, by group."""

    blocks: tuple[Sequence[KVCacheBlock], ...]


# What a lookup finds: blocks, tokens that can be resumed from, tokens whose KV is there.
FoundBlocks = tuple[KVCacheBlocks, int, int]


class KVCacheManager(Protocol):
    """What a scheduler asks for blocks."""

    block_pool: BlockPool
    coordinator: Coordinator
    empty_kv_cache_blocks: KVCacheBlocks
    use_eagle: bool

    def prefix_cache_lookup_enabled(self, request: Request) -> bool:
        """Whether a request may use what is cached."""

    def get_computed_blocks(self, request: Request, *limit: int | None) -> FoundBlocks:
        """Look a request up."""

    def allocate_slots(self, request: Request, num_new_tokens: int) -> KVCacheBlocks | None:
        """Give a request blocks, None where there are too few."""

    def remove_skipped_blocks(self, request_id: str, processed_computed_tokens: int) -> None:
        """Free blocks that a request needs no more."""


class LoraRequest(Protocol):
    """An adapter's name and place."""

    lora_name: str
    lora_path: str


class Request(Protocol):
    """A request, as the scheduler has it."""

    request_id: str
    block_hashes: list[bytes]
    num_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    shared_prefix_boundary: int
    status: object
    prompt_token_ids: list[int] | None
    prompt_embeds: Tensor | None
    lora_request: LoraRequest | None
    cache_salt: str | None
    mm_features: Sequence[Any]
    session_id: str | None


class BoundaryStates(Protocol):
    """The states that a step leaves behind: (group, block, tokens) by request."""

    boundary_state_offloads: Mapping[str, Sequence[tuple[int, int, int]]]


class SchedulerOutput(Protocol):
    """What a step was planned to do."""

    num_scheduled_tokens: Mapping[str, int]
    kv_connector_block_state: BoundaryStates | None
    kv_connector_metadata: object
    scheduled_spec_decode_tokens: Mapping[str, Sequence[int]]
    num_invalid_spec_tokens: Mapping[str, int] | None


class ConnectorOutput(Protocol):
    """What the workers' connectors say of a step."""

    kv_connector_worker_meta: object


class ModelRunnerOutput(Protocol):
    """What the workers hand back of a step."""

    kv_connector_output: ConnectorOutput | None
    req_id_to_index: Mapping[str, int]
    sampled_token_ids: Sequence[Sequence[int]]


class Scheduler(Protocol):
    """A scheduler of one engine."""

    connector: object
    kv_cache_manager: KVCacheManager
    waiting: Iterable[Request]

    def reset_prefix_cache(self, reset_running_requests: bool = ...) -> bool: ...


class KVCacheSpec(Protocol):
    """What a layer keeps in a block."""

    block_size: int
    page_size_bytes: int


class MambaSpec(KVCacheSpec, Protocol):
    """What a recurrent layer keeps in a block."""

    shapes: Sequence[tuple[int, ...]]
    dtypes: Sequence[Any]
    mamba_type: Any


class KVCacheGroup(Protocol):
    """Layers that share their blocks."""

    kv_cache_spec: KVCacheSpec
    layer_names: Sequence[str]


class KVCacheConfig(Protocol):
    """How the memory is divided."""

    num_blocks: int
    kv_cache_groups: Sequence[KVCacheGroup]
    prefix_cache_retention_interval: int | None


class CacheConfig(Protocol):
    """What was asked for of the cache."""

    block_size: int
    enable_prefix_caching: bool
    mamba_cache_mode: str
    mamba_ssm_cache_dtype: str
    num_gpu_blocks_override: int | None
    prefix_cache_retention_interval: int | None


class ModelConfig(Protocol):
    """The model."""

    dtype: object
    hf_text_config: Any
    is_hybrid: bool
    max_model_len: int


class TransferConfig(Protocol):
    """The connector and its settings."""

    kv_connector_extra_config: dict[str, Any]


class ParallelConfig(Protocol):
    """How many processes share the work."""

    tensor_parallel_size: int
    data_parallel_size: int


class CompilationConfig(Protocol):
    """How the model is compiled; its layers are known there."""

    static_forward_context: dict[str, Any]


class SpeculativeConfig(Protocol):
    """How tokens are drafted."""

    method: str | None
    draft_model_config: ModelConfig | None


class AuxOutputConfig(Protocol):
    """What is handed out beside tokens."""

    @property
    def enabled(self) -> bool: ...


class VllmConfig(Protocol):
    """The configuration of an engine."""

    cache_config: CacheConfig
    model_config: ModelConfig
    parallel_config: ParallelConfig
    compilation_config: CompilationConfig
    kv_transfer_config: TransferConfig
    additional_config: object
    speculative_config: SpeculativeConfig | None
    aux_output_config: AuxOutputConfig
    num_speculative_tokens: int


class EngineArgs(Protocol):
    """What was asked for on the command line."""

    additional_config: object
    block_size: int | None
    enable_prefix_caching: bool | None
    worker_cls: str
    kv_transfer_config: object
    tensor_parallel_size: int


class _ModelRunner(Protocol):
    get_kv_cache_spec: Callable[[], Mapping[str, KVCacheSpec]]


class Worker(Protocol):
    """A process with one device."""

    vllm_config: VllmConfig
    model_runner: _ModelRunner
