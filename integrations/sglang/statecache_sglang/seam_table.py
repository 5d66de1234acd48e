"""Every seam of SGLang that statecache uses, as a table to check against what is installed.

Nothing of SGLang is imported before a seam is looked at.
"""

from __future__ import annotations

from statecache.engine.seams import Seam, methods
from statecache.engine.views import View
from statecache_sglang import pool_views, views
from statecache_sglang.engine_paths import (
    ACTIONS,
    ADDER,
    CACHE,
    CHECKER,
    CHECKPOINTS,
    COMPONENTS,
    CONFIGURATOR,
    CONTEXT,
    INTERFACE,
    POOL,
    PREFIX_CACHE,
    PYTHON_CORE,
    REGISTRY,
    RESULTS,
    RUST_BINDING,
    RUST_CORE,
    SCHEDULER,
    SERVER_ARGS,
    STATS,
    STREAMER,
)

__all__ = ["OPTIONAL", "RECORDING_SEAMS", "RUST_LEAD", "SEAMS", "TESTED", "VIEWS"]

TESTED = ("0.5.22", "0.5.23")

# What only one feature needs, by what people are told is off.
RUST_LEAD = "the Rust tree core (the Python one takes its place)"
_ABORTS = "the record of requests that are aborted while they wait"
_UNCACHED = "the count of states past a stop that SGLang itself does not cache"

_FREES = "device_frees host_frees"
_PATH_NODE = ("node_id", "parent_id", "path_start", "path_end", "full_value_len", "num_children")

SEAMS: tuple[Seam, ...] = (
    Seam(SERVER_ARGS, "ServerArgs.add_cli_args"),
    Seam(SERVER_ARGS, "ServerArgs.from_cli_args", ("cls", "args")),
    Seam(SERVER_ARGS, "ServerArgs.resolve_once", ("self",)),
    Seam(COMPONENTS, "MambaComponent", ("cache", "params"), base="TreeComponent"),
    *methods(
        f"{COMPONENTS}.mamba",
        "MambaComponent",
        {
            "refresh_lru": "phase node root_node",
            "commit_insert_component_data": "node is_new_leaf params result cache_actions",
            "evict_component": f"node {_FREES} cache_actions target | node {_FREES} target",
            "release_component_lock": "node params lock_host",
            "prepare_for_caching_req": "req insert_params token_ids_len is_finished",
            "finalize_match_result_in_cache": "params result",
            "_alloc_mamba_slot": "req | ",
            "_alloc_int8_ckpt_slot": "",
            "_evict_device_start": "request_cnt",
            "_evict_device_next_node": f"tracker {_FREES} cache_actions | tracker {_FREES}",
            "_evict_device_end": "",
        },
    ),
    Seam(COMPONENTS, "LRURefreshPhase.MATCH_END"),
    Seam(COMPONENTS, "ComponentType.MAMBA"),
    Seam(COMPONENTS, "EvictLayer.DEVICE"),
    Seam(COMPONENTS, "InternalStateBackup", ("node_id", "num_tokens")),
    Seam(PYTHON_CORE, "UnifiedTreeCore", ("params", "components")),
    *methods(
        PYTHON_CORE,
        "UnifiedTreeCore",
        {
            "reset": "",
            "node_by_id": "node_id",
            "set_component_device_value": "node_id component_type value",
            "set_hicache_enabled": "",
            "mark_write_through_pending": "node_ids ack_id",
            "finish_write_through": "node_ids ack_id",
            "finish_mamba_state_eviction": "node_id",
            "_evict_component_and_detach_lru": f"node comp {_FREES} cache_actions target tracker"
            f" | node comp {_FREES} target tracker",
            "_cascade_evict": f"node trigger tracker {_FREES} cache_actions target"
            f" | node trigger tracker {_FREES} target",
        },
    ),
    Seam(
        RUST_CORE,
        "RustUnifiedTreeCore",
        ("params",),
        base="UnifiedTreeCoreInterface",
        optional=RUST_LEAD,
    ),
    *methods(
        RUST_CORE,
        "RustUnifiedTreeCore",
        {
            "reset": "",
            "match_prefix": "params",
            "begin_insert": "params",
            "resume_insert": "",
            "is_root": "node_id",
            "inc_lock_ref": "node_id skip_lock_components",
            "dec_lock_ref": "node_id params skip_swa",
            "inc_full_pin": "node_id",
            "dec_full_pin": "node_id",
            "evict_device_start": "component_type request_cnt",
            "evict_device_next_node": "component_type tracker",
            "evict_device_end": "component_type",
            "evict_device_leaf": "node_id is_write_back",
            "evict_excess_path_states": "tail_node_id device_frees host_frees cache_actions",
            "get_component_device_value": "node_id component_type",
            "set_component_device_value": "node_id component_type value",
            "set_hicache_enabled": "",
            "component_has_host_value_only": "node_id component_type",
            "commit_backup": "node_id host_indices comp_xfers",
            "commit_load_back": "node_id device_indices kv_xfer comp_xfers",
            "mark_write_through_pending": "node_ids ack_id",
            "finish_write_through": "node_ids ack_id",
            "finish_mamba_state_eviction": "node_id",
            "demote": "node_id",
            "drop_subtree_no_host": "node_id",
            "drive_host_eviction": "component_type num_tokens",
        },
        optional=RUST_LEAD,
    ),
    Seam(RUST_CORE, "RustUnifiedTreeCore.is_write_back", optional=RUST_LEAD),
    Seam(RUST_CORE, "RustUnifiedTreeCore._bindings", optional=RUST_LEAD),
    Seam(INTERFACE, "TreePathNodeInfo", _PATH_NODE, optional=RUST_LEAD),
    Seam(ACTIONS, "MambaEvictExcessPathStates", optional=RUST_LEAD),
    *(
        Seam(RUST_BINDING, name, optional=RUST_LEAD)
        for name in (
            "TreeCoreInitParamsBinding",
            "DecLockRefParamsBinding",
            "RustUnifiedTreeCoreBinding.collect_path_info",
            "RustUnifiedTreeCoreBinding.inc_lock_ref",
            "RustUnifiedTreeCoreBinding.dec_lock_ref",
        )
    ),
    Seam(INTERFACE, "EvictDeviceNextNodeResult"),
    Seam(REGISTRY, "register_tree_core_backend", ("name", "factory")),
    Seam(REGISTRY, "resolve_tree_core_backend", ("name", "params")),
    Seam(CACHE, "select_tree_core_backend", ("params",)),
    Seam(CACHE, "COMPONENT_REGISTRY"),
    *methods(
        CACHE,
        "UnifiedRadixCache",
        {
            "inc_lock_ref": "node_id skip_lock_components",
            "dec_lock_ref": "node_id params skip_swa",
            "mamba_evictable_size": "",
            "mamba_protected_size": "",
            "init_load_back": "params",
            "supports_mamba": "",
            "evict_for_alloc": "params allocation_reclaim_satisfied | params",
            "evict": "params",
            "attach_storage_backend": "storage_backend storage_backend_extra_config_json"
            " served_model_name hicache_storage_prefetch_policy hicache_write_policy",
        },
    ),
    *methods(ADDER, "PrefillAdder", {"add_one_req": "req has_chunked_req truncation_align_size"}),
    *methods(ADDER, "PrefillAdder", {"add_chunked_req": "req", "budget_state": ""}),
    *methods(
        ADDER, "SchedulePolicy", {"calc_priority": "waiting_queue running_batch processed_tokens"}
    ),
    *(Seam(ADDER, f"AddReqResult.{name}") for name in ("CONTINUE", "NO_TOKEN", "OTHER")),
    Seam(POOL, "HybridReqToTokenPool", base="ReqToTokenPool"),
    Seam(POOL, "HybridReqToTokenPool._init_mamba_pool"),
    Seam(CHECKPOINTS, "maybe_init_int8_mamba_checkpoint_pool"),
    *methods(CONFIGURATOR, "KVCacheConfigurator", {"_handle_max_mamba_cache": "total_rest_memory"}),
    Seam(PREFIX_CACHE, "EvictParams"),
    Seam(PREFIX_CACHE, "MatchPrefixParams"),
    Seam(PREFIX_CACHE, "MatchResult"),
    *methods(
        CHECKER,
        "SchedulerInvariantChecker",
        {"_check_mamba_pool": "ps", "_requests_owning_rows": ""},
    ),
    Seam(STATS, "kv_mamba_slots", ("kv",)),
    *methods(
        RESULTS,
        "SchedulerBatchResultProcessor",
        {
            "_resolve_spec_v2_tokens": "result batch",
        },
    ),
    *methods(
        RESULTS,
        "SchedulerBatchResultProcessor",
        {"_mamba_can_cache_finished_req": "req result i"},
        _UNCACHED,
    ),
    *(
        Seam(CONTEXT, name, ())
        for name in ("get_schedule", "get_observability", "get_parallel", "get_serving", "get_spec")
    ),
)

# What a recording and a dry run need beside them.
RECORDING_SEAMS: tuple[Seam, ...] = (
    *methods(
        SCHEDULER,
        "Scheduler",
        {
            "__init__": "server_args port_args",
            "_add_request_to_queue": "req is_retracted",
        },
    ),
    *methods(SCHEDULER, "Scheduler", {"send_abort_output": "abort_req req"}, _ABORTS),
    *methods(
        STREAMER,
        "SchedulerOutputStreamer",
        {"stream_output": "reqs return_logprob skip_req"},
    ),
)

OPTIONAL: tuple[Seam, ...] = tuple(seam for seam in (*SEAMS, *RECORDING_SEAMS) if seam.optional)

_BATCH = "sglang.srt.managers.schedule_batch"
_TREE = "sglang.srt.mem_cache.unified_cache"
_PLE = "sglang.srt.mem_cache.ple_state_pool"

# What is read of SGLang's objects, by the class that has it.
VIEWS: tuple[View, ...] = (
    View(views.ServerArguments, f"{SERVER_ARGS}:ServerArgs"),
    View(views.Session, "sglang.srt.session.session_controller:Session"),
    View(pool_views.RequestKv, f"{_BATCH}:ReqKvInfo"),
    View(views.Request, f"{_BATCH}:Req"),
    View(views.PrefillAdder, f"{ADDER}:PrefillAdder"),
    View(views.SchedulePolicy, f"{ADDER}:SchedulePolicy"),
    View(views.Scheduler, f"{SCHEDULER}:Scheduler"),
    View(views.ResultProcessor, f"{RESULTS}:SchedulerBatchResultProcessor"),
    View(views.DecodeBatch, f"{_BATCH}:ScheduleBatch"),
    View(views.VerifyResult, "sglang.srt.managers.utils:GenerationBatchResult"),
    View(views.InvariantChecker, f"{CHECKER}:SchedulerInvariantChecker"),
    View(pool_views.StateTensors, f"{POOL}:MambaPool.State"),
    View(pool_views.StatePool, f"{POOL}:MambaPool"),
    View(pool_views.ShortConvStates, f"{_PLE}:ShortConvPool"),
    View(pool_views.NGramStates, f"{_PLE}:NGramPool"),
    View(pool_views.StateAllocator, "sglang.srt.mem_cache.allocator.mamba:MambaSlotAllocator"),
    View(pool_views.Checkpoints, f"{CHECKPOINTS}:MambaCheckpointPool"),
    View(pool_views.RequestPool, f"{POOL}:HybridReqToTokenPool"),
    View(pool_views.StateShapes, "sglang.srt.configs.mamba_utils:Mamba2StateShape"),
    View(pool_views.StateTypes, "sglang.srt.configs.mamba_utils:Mamba2StateDType"),
    View(pool_views.StateParameters, "sglang.srt.configs.mamba_utils:Mamba2CacheParams"),
    View(
        pool_views.SpeculativeAlgorithm,
        "sglang.srt.speculative.spec_info:SpeculativeAlgorithm",
    ),
    View(pool_views.Configurator, f"{CONFIGURATOR}:KVCacheConfigurator"),
    View(views.CacheParameters, "sglang.srt.mem_cache.cache_init_params:CacheInitParams"),
    View(views.RadixKey, "sglang.srt.mem_cache.radix_cache:RadixKey"),
    View(views.LockParameters, f"{PREFIX_CACHE}:DecLockRefParams"),
    View(views.Lock, f"{PREFIX_CACHE}:IncLockRefResult"),
    View(views.MatchParameters, f"{PREFIX_CACHE}:MatchPrefixParams"),
    View(views.MatchResult, f"{PREFIX_CACHE}:MatchResult"),
    View(views.InsertParameters, f"{PREFIX_CACHE}:InsertParams"),
    View(views.InsertResult, f"{PREFIX_CACHE}:InsertResult"),
    View(views.InsertStep, f"{INTERFACE}:InsertStepResult"),
    View(views.EvictionStep, f"{INTERFACE}:BaseEvictionResult"),
    View(views.WalkStep, f"{INTERFACE}:EvictDeviceNextNodeResult"),
    View(views.LoadBackParameters, f"{PREFIX_CACHE}:InitLoadBackParams"),
    View(views.Transfer, "sglang.srt.mem_cache.hicache_storage:PoolTransfer"),
    View(views.StateComponent, f"{COMPONENTS}:MambaComponent"),
    View(views.TreeCache, f"{CACHE}:UnifiedRadixCache"),
    View(views.ComponentData, f"{_TREE}.components.base:ComponentData"),
    View(views.TreeNode, f"{PYTHON_CORE}:UnifiedTreeNode"),
    View(views.TreeCore, f"{PYTHON_CORE}:UnifiedTreeCore"),
    View(views.PythonCore, f"{PYTHON_CORE}:UnifiedTreeCore"),
    View(views.RustCore, f"{RUST_CORE}:RustUnifiedTreeCore", optional=RUST_LEAD),
    View(views.RustBinding, f"{RUST_BINDING}:RustUnifiedTreeCoreBinding", optional=RUST_LEAD),
    View(views.InnerStep, f"{INTERFACE}:EvictDeviceNextNodeResult", optional=RUST_LEAD),
)
