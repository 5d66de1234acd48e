"""Every seam of vLLM that statecache uses, as a table to check against what is installed."""

from __future__ import annotations

from statecache.engine.seams import Seam, methods, replaced
from statecache.engine.views import View
from statecache_vllm import views
from statecache_vllm.engine_paths import (
    ARGUMENTS,
    BLOCK_METRICS,
    CONNECTOR,
    COORDINATOR,
    HASHES,
    LORA,
    MANAGER,
    OUTPUTS,
    POOL,
    REQUEST,
    SCHEDULER,
    SCHEDULER_OUTPUT,
    SPECS,
    STATS,
    TRANSFER,
    TYPE_MANAGER,
    WORKER,
)
from statecache_vllm.unsupported import REFUSED

__all__ = ["REPLACED", "SEAMS", "TESTED", "VIEWS"]

TESTED = ("0.31.0", "0.32.0", "0.33.0")

# Classes in whose place the adapter puts its own.
REPLACED: tuple[Seam, ...] = (
    *replaced(
        POOL,
        "BlockHashToBlockMap",
        {
            "get_one_block": "key",
            "contain": "key block_id",
            "insert": "key block",
            "pop": "key block_id",
        },
    ),
    *replaced(
        HASHES,
        "FreeKVCacheBlockQueue",
        {
            "popleft": "",
            "popleft_n": "n",
            "remove": "block",
            "append": "block",
            "append_n": "blocks",
            "prepend_n": "blocks",
            "get_all_free_blocks": "",
            "iter_blocks_after": "cursor",
        },
    ),
)

SEAMS: tuple[Seam, ...] = (
    *REPLACED,
    Seam(ARGUMENTS, "EngineArgs.add_cli_args", ("parser",)),
    Seam(ARGUMENTS, "EngineArgs.from_cli_args", ("cls", "args")),
    Seam(ARGUMENTS, "EngineArgs.create_engine_config", ("self", "usage_context", "headless")),
    Seam(ARGUMENTS, "EngineArgs", fields=(*REFUSED,)),
    Seam(TRANSFER, "KVTransferConfig"),
    Seam(CONNECTOR, "SupportsHMA.request_finished_all_groups", ("self", "request", "block_ids")),
    *methods(
        CONNECTOR,
        "KVConnectorBase_V1",
        {
            "bind_kv_cache_manager": "kv_cache_manager",
            "build_connector_meta": "scheduler_output",
            "on_new_request": "request",
            "get_num_new_matched_tokens": "request num_computed_tokens",
            "update_state_after_alloc": "request blocks num_external_tokens",
            "update_connector_output": "connector_output",
            "register_kv_caches": "kv_caches",
            "wait_for_save": "",
            "build_connector_worker_meta": "",
            "get_kv_connector_stats": "",
        },
    ),
    Seam(CONNECTOR, "KVConnectorWorkerMetadata.aggregate", ("self", "other")),
    Seam(CONNECTOR, "KVConnectorBase_V1.build_kv_connector_stats", ("cls", "data")),
    Seam(
        CONNECTOR,
        "KVConnectorBase_V1.build_prom_metrics",
        ("cls", "vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
    ),
    Seam(STATS, "KVConnectorStats", ("data",)),
    *methods(
        STATS, "KVConnectorProm", {"__init__": "vllm_config labelnames per_engine_labelvalues"}
    ),
    Seam(STATS, "KVConnectorLogging.observe", ("self", "transfer_stats_data")),
    Seam(STATS, "KVConnectorPromMetrics.observe", ("self", "transfer_stats_data", "engine_idx")),
    *methods(
        POOL,
        "BlockPool",
        {
            "get_new_blocks": "num_blocks",
            "free_blocks": "ordered_blocks",
            "evict_blocks": "block_ids",
            "reset_prefix_cache": "",
            "cache_partial_block": "request block num_tokens kv_cache_group_id block_size"
            " replace_existing_hashes",
            "cache_full_blocks": "request blocks num_cached_blocks num_full_blocks block_size"
            " kv_cache_group_id block_mask",
        },
    ),
    Seam(
        POOL,
        "BlockPool.touch",
        ("self", "blocks"),
        code=(
            "ref_cnt",
            "is_null",
            "free_block_queue",
            "remove",
            "metrics_collector",
            "on_block_accessed",
        ),
        replaced=True,
    ),
    Seam(HASHES, "get_group_id", ("key",)),
    Seam(HASHES, "get_block_hash", ("key",)),
    Seam(HASHES, "make_block_hash_with_group_id", ("block_hash", "group_id")),
    *(
        Seam(HASHES, f"KVCacheBlock.{name}")
        for name in ("block_id", "block_hash", "ref_cnt", "is_null")
    ),
    *methods(
        MANAGER,
        "KVCacheManager",
        {
            "get_computed_blocks": "request | request max_cache_hit_length",
            "free": "request",
            "remove_skipped_blocks": "request_id processed_computed_tokens num_prompt_tokens",
        },
    ),
    Seam(MANAGER, "KVCacheManager.get_computed_blocks", items=3),
    Seam(MANAGER, "KVCacheManager.allocate_slots"),
    *methods(
        COORDINATOR,
        "HybridKVCacheCoordinator",
        {"find_longest_cache_hit_per_group": "block_hashes max_cache_hit_length"},
    ),
    Seam(COORDINATOR, "HybridKVCacheCoordinator.find_longest_cache_hit_per_group", items=2),
    Seam(SCHEDULER_OUTPUT, "KVConnectorBlockState.boundary_state_offloads", items=3),
    Seam(REQUEST, "RequestStatus.RUNNING"),
    Seam(SPECS, "MambaSpec", base="KVCacheSpec"),
    Seam(SPECS, "FullAttentionSpec"),
    *methods(
        SCHEDULER,
        "Scheduler",
        {
            "_mamba_block_aligned_split": "request num_new_tokens num_new_local_computed_tokens"
            " num_external_computed_tokens",
            "update_from_output": "scheduler_output model_runner_output",
            "reset_prefix_cache": "reset_running_requests reset_connector",
            "reset_connector_cache": "",
            "__init__": "vllm_config kv_cache_config structured_output_manager block_size"
            " hash_block_size mm_registry include_finished_set log_stats",
        },
    ),
    *methods(
        WORKER, "Worker", {"determine_available_memory": "", "execute_model": "scheduler_output"}
    ),
)

# The types that say what is read of an object, and the class of vLLM that each is a view of.
VIEWS: tuple[View, ...] = (
    View(views.KVCacheBlock, f"{HASHES}:KVCacheBlock"),
    View(views.FreeQueue, f"{HASHES}:FreeKVCacheBlockQueue"),
    View(views.BlockMap, f"{POOL}:BlockHashToBlockMap"),
    View(views.BlockPool, f"{POOL}:BlockPool"),
    View(views.MetricsCollector, f"{BLOCK_METRICS}:KVCacheMetricsCollector"),
    View(views.SingleTypeManager, f"{TYPE_MANAGER}:SingleTypeKVCacheManager"),
    View(views.StateManager, f"{TYPE_MANAGER}:MambaManager"),
    View(views.Coordinator, f"{COORDINATOR}:HybridKVCacheCoordinator"),
    View(views.KVCacheBlocks, f"{MANAGER}:KVCacheBlocks"),
    View(views.KVCacheManager, f"{MANAGER}:KVCacheManager"),
    View(views.Request, f"{REQUEST}:Request"),
    View(views.LoraRequest, f"{LORA}:LoRARequest"),
    View(views.KVCacheSpec, f"{SPECS}:KVCacheSpec"),
    View(views.MambaSpec, f"{SPECS}:MambaSpec"),
    View(views.KVCacheGroup, f"{SPECS}:KVCacheGroupSpec"),
    View(views.KVCacheConfig, f"{SPECS}:KVCacheConfig"),
    View(views.Scheduler, f"{SCHEDULER}:Scheduler"),
    View(views.SchedulerOutput, f"{SCHEDULER_OUTPUT}:SchedulerOutput"),
    View(views.BoundaryStates, f"{SCHEDULER_OUTPUT}:KVConnectorBlockState"),
    View(views.ModelRunnerOutput, f"{OUTPUTS}:ModelRunnerOutput"),
    View(views.ConnectorOutput, f"{OUTPUTS}:KVConnectorOutput"),
    View(views.EngineArgs, f"{ARGUMENTS}:EngineArgs"),
    View(views.VllmConfig, f"{TRANSFER}:VllmConfig"),
    View(views.CacheConfig, f"{TRANSFER}:CacheConfig"),
    View(views.ModelConfig, f"{TRANSFER}:ModelConfig"),
    View(views.TransferConfig, f"{TRANSFER}:KVTransferConfig"),
    View(views.ParallelConfig, f"{TRANSFER}:ParallelConfig"),
    View(views.CompilationConfig, f"{TRANSFER}:CompilationConfig"),
    View(views.SpeculativeConfig, f"{TRANSFER}:SpeculativeConfig"),
    View(views.AuxOutputConfig, f"{TRANSFER}:AuxOutputConfig"),
    View(views.Worker, f"{WORKER}:Worker"),
)
