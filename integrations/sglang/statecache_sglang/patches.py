"""Every change of SGLang: what, why, and when it can go. `install` says what takes each place.

A change is all that SGLang's plugins have no hook for. What it has a hook for is in `HOOKS`: made
when the plugin is loaded, by SGLang itself, and never taken back.
"""

from __future__ import annotations

from statecache.engine.patching import Patch
from statecache_sglang import engine_paths as at

__all__ = ["HOOKS", "INT8_PATCHES", "PATCHES", "RECORDING_PATCHES", "STATE_PATCHES"]

TREE_CORE = Patch(
    f"{at.REGISTRY}:register_tree_core_backend",
    why="Recurrent states are dropped in LRU order, whatever the eviction policy of the KV: the"
    " plugin's tree cores ask the state index for each victim.",
    upstream="register_tree_core_backend, a public registry (sglang#32710: the Rust core, 0.5.19;"
    " sglang#39627: the default since 0.5.21)",
    remove_when="SGLang takes a policy for states from outside (sglang#30300 and sglang#38000"
    " propose some of its own)",
)
SELECT_TREE_CORE = Patch(
    f"{at.CACHE}:select_tree_core_backend",
    why="The choice does not see whether the cache that is built holds recurrent states. To name"
    " the plugin's core in SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND would not do: a cache that names"
    " its core itself is not asked, the sharding of KV refuses any name but `python`, and a process"
    " that inherits the variable without the plugin cannot build a cache.",
    upstream="select_tree_core_backend, CacheInitParams.tree_core_backend (0.5.21)",
    remove_when="a plugin can wrap the core that a cache is given",
)
MAMBA_COMPONENT = Patch(
    f"{at.CACHE}:COMPONENT_REGISTRY",
    why="The component for states decides when a state is cached and, in the Python core, which one"
    " is dropped; it asserts where every state slot is in use.",
    upstream="MambaComponent; CacheInitParams.component_registry_override",
    remove_when="component_registry_override no longer forces the Python core",
)
ADD_ONE_REQ = Patch(
    f"{at.ADDER}:PrefillAdder.add_one_req",
    why="A request is admitted without the state slots that it needs; SGLang asserts there later,"
    " and the server dies. Admission is also where a prompt is counted, once.",
    upstream="PrefillAdder.add_one_req, HybridReqToTokenPool.alloc",
    remove_when="admission counts state slots as it counts KV, and tells the cache of it",
)
ADD_CHUNKED_REQ = Patch(
    f"{at.ADDER}:PrefillAdder.add_chunked_req",
    why="A state where two prompts part is cached only where a chunk ends, and a chunk ends where"
    " the budget of a step does.",
    upstream="PrefillAdder.add_chunked_req, chunked_req_limit",
    remove_when="a request can say where its chunks are to end",
)
QUEUE_SORTED = Patch(
    f"{at.ADDER}:SchedulePolicy.calc_priority",
    why="Queued requests that begin alike each compute what they share: one is to leave a state"
    " where they part, and nothing else shows the queue before a batch is made.",
    upstream="SchedulePolicy.calc_priority",
    remove_when="SGLang has a request wait for a prefix that another one is computing",
)
INIT_LOAD_BACK = Patch(
    f"{at.CACHE}:UnifiedRadixCache.init_load_back",
    why="A state that comes back from the host takes two slots; without them SGLang asserts, or"
    " goes on with the prefix of the device but without the state at its end.",
    upstream="UnifiedRadixCache.init_load_back, MambaComponent.finalize_match_result_in_cache",
    remove_when="a load that gets no slot waits, and one that fails gives up the prefix",
)
ATTACH_STORAGE = Patch(
    f"{at.CACHE}:UnifiedRadixCache.attach_storage_backend",
    why="A storage backend that a running server gets puts states on the host of which the index"
    " is not told.",
    upstream="UnifiedRadixCache.attach_storage_backend",
    remove_when="the adapter follows states that are prefetched from storage",
)
VERIFIED = Patch(
    f"{at.RESULTS}:SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
    why="A verify step of speculative decoding can run past the end of a request: the state in its"
    " slot is then that of more tokens than any key has.",
    upstream="SchedulerBatchResultProcessor._resolve_spec_v2_tokens, owned_kv_len",
    remove_when="a request says of how many tokens its state is",
)
NOT_CACHED = Patch(
    f"{at.RESULTS}:SchedulerBatchResultProcessor._mamba_can_cache_finished_req",
    why="States that SGLang itself does not cache, as they ran past a stop, are counted with those"
    " of the plugin.",
    upstream="SchedulerBatchResultProcessor._mamba_can_cache_finished_req (0.5.23)",
    remove_when=VERIFIED.remove_when,
)
CHECK_STATE_POOL = Patch(
    f"{at.CHECKER}:SchedulerInvariantChecker._check_mamba_pool",
    why="SGLang adds up its own counters; here the states of the index are held against them, at"
    " any idle moment.",
    upstream="SchedulerInvariantChecker._check_mamba_pool",
    remove_when="never: it is a check of ours",
)

OWN_INT8_POOL = Patch(
    f"{at.CHECKPOINTS}:maybe_init_int8_mamba_checkpoint_pool",
    why="SGLang's int8 pool is not built: the plugin's takes its place.",
    upstream="maybe_init_int8_mamba_checkpoint_pool (sglang#28185)",
    remove_when="SGLang's pool refuses NaN and Inf, keeps side states (sglang#38619) and lies"
    " within the memory budget, or takes a pool from outside",
)
INIT_STATE_POOL = Patch(
    f"{at.POOL}:HybridReqToTokenPool._init_mamba_pool",
    why="The plugin's int8 pool is built beside the states of running requests. Were it built where"
    " SGLang builds its own, models with side states would be refused.",
    upstream="HybridReqToTokenPool._init_mamba_pool (sglang#28185, sglang#38619)",
    remove_when=OWN_INT8_POOL.remove_when,
)
EVICT_FOR_ALLOC = Patch(
    f"{at.CACHE}:UnifiedRadixCache.evict_for_alloc",
    why="A shortage of active slots destroys checkpoints, which lie in another pool: no active slot"
    " comes free.",
    upstream="UnifiedRadixCache.evict_for_alloc (sglang#28185)",
    remove_when="SGLang compares a shortage with the pool that the dropped states lie in",
)
STATE_BUDGET = Patch(
    f"{at.CONFIGURATOR}:KVCacheConfigurator._handle_max_mamba_cache",
    why="The bytes of an int8 pool are not part of what SGLang divides between states and KV.",
    upstream="KVCacheConfigurator._handle_max_mamba_cache (sglang#28185)",
    remove_when="SGLang takes the bytes of checkpoints off its budget",
)

_NO_HEARING = "SGLang tells its plugins of no request that comes or goes; a recording, or a dry run"
_UNTIL_EVENTS = "SGLang has an event of a plugin's for it"
SCHEDULER_INIT = Patch(
    f"{at.SCHEDULER}:Scheduler.__init__",
    why=f"{_NO_HEARING}, begins when the scheduler is there.",
    upstream="Scheduler.__init__",
    remove_when=_UNTIL_EVENTS,
)
QUEUE_REQUEST = Patch(
    f"{at.SCHEDULER}:Scheduler._add_request_to_queue",
    why=f"{_NO_HEARING}, needs its arrival.",
    upstream="Scheduler._add_request_to_queue",
    remove_when=_UNTIL_EVENTS,
)
ABORT_REQUEST = Patch(
    f"{at.SCHEDULER}:Scheduler.send_abort_output",
    why=f"{_NO_HEARING}, needs the end of one that was aborted while it waited.",
    upstream="Scheduler.send_abort_output (0.5.23; without it such requests are not seen)",
    remove_when=_UNTIL_EVENTS,
)
STREAM_OUTPUT = Patch(
    f"{at.STREAMER}:SchedulerOutputStreamer.stream_output",
    why=f"{_NO_HEARING}, needs its end.",
    upstream="SchedulerOutputStreamer.stream_output",
    remove_when=_UNTIL_EVENTS,
)

_FLAGS = "The flags of the plugin"
_PLUGIN_HOOKS = "HookRegistry, SGLang's hooks for plugins (sglang#21388)"
HOOKS: tuple[Patch, ...] = (
    Patch(
        f"{at.SERVER_ARGS}:ServerArgs.add_cli_args",
        why=f"{_FLAGS} are added to SGLang's.",
        upstream=_PLUGIN_HOOKS,
        remove_when="plugins can register flags",
    ),
    Patch(
        f"{at.SERVER_ARGS}:ServerArgs.from_cli_args",
        why=f"{_FLAGS} are read.",
        upstream=_PLUGIN_HOOKS,
        remove_when="plugins can register flags",
    ),
    Patch(
        f"{at.SERVER_ARGS}:ServerArgs.resolve_once",
        why="What the plugin does not support stops a server before it is configured.",
        upstream=_PLUGIN_HOOKS,
        remove_when="plugins are asked about a configuration",
    ),
    Patch(
        f"{at.ENGINE}:Engine.server_args_class",
        why=f"{_FLAGS} are arguments of `Engine(...)`, too, which takes no foreign ones.",
        upstream="Engine.__init__, which loads the plugins and then builds server_args_class",
        remove_when="plugins can register arguments",
    ),
)

STATE_PATCHES = (
    TREE_CORE,
    SELECT_TREE_CORE,
    MAMBA_COMPONENT,
    ADD_ONE_REQ,
    ADD_CHUNKED_REQ,
    QUEUE_SORTED,
    INIT_LOAD_BACK,
    VERIFIED,
    NOT_CACHED,
    CHECK_STATE_POOL,
    ATTACH_STORAGE,
)
INT8_PATCHES = (OWN_INT8_POOL, INIT_STATE_POOL, EVICT_FOR_ALLOC, STATE_BUDGET)
RECORDING_PATCHES = (SCHEDULER_INIT, QUEUE_REQUEST, ABORT_REQUEST, STREAM_OUTPUT)
PATCHES: tuple[Patch, ...] = (*STATE_PATCHES, *INT8_PATCHES, *RECORDING_PATCHES)
