"""Every change of vLLM: what is put where, why, and when it can go.

The rows of `ALWAYS` are there as soon as the plugin is loaded, before it is known whether it is
asked for; `seams.hook_engine_args` installs them, without loading statecache. The others are
installed for one scheduler, all of them or none.
"""

from __future__ import annotations

from statecache.engine.patching import Patch
from statecache_vllm.engine_paths import ARGUMENTS, MANAGER, POOL, SCHEDULER, STATS

__all__ = [
    "ALLOCATE_SLOTS",
    "ALWAYS",
    "BEGIN_METRICS",
    "BEGIN_SCHEDULER",
    "BLOCK_MAP",
    "CACHE_PARTIAL_BLOCK",
    "END_PREFILL_CHUNK",
    "EVICT_BLOCKS",
    "FREE_QUEUE",
    "GET_COMPUTED_BLOCKS",
    "LOG_CONNECTOR",
    "PATCHES",
    "REMOVE_SKIPPED_BLOCKS",
    "RESET_CONNECTOR_CACHE",
    "RESET_PREFIX_CACHE",
    "TOUCH",
    "UPDATE_FROM_OUTPUT",
]

_NO_FLAGS_OF_PLUGINS = "a plugin has no way to add flags to vLLM's command line"
_PLUGGABLE_POLICY = "vLLM has a pluggable policy for its block pool (vllm#40270, open)"
_NO_CONNECTOR = (
    "vLLM 0.33 hashes no look-ahead tokens where a KV connector is configured (vllm#50897)"
)
_RESET_EVENT = "vLLM tells a connector of `BlockPool.reset_prefix_cache` and `evict_blocks`"

ALWAYS = (
    Patch(
        f"{ARGUMENTS}:EngineArgs.add_cli_args",
        why="adds the plugin's flags to vllm serve --help",
        upstream=_NO_FLAGS_OF_PLUGINS,
        remove_when="general plugins can register arguments",
    ),
    Patch(
        f"{ARGUMENTS}:EngineArgs.from_cli_args",
        why="keeps the plugin's flags, of which vLLM drops all that are no field of its own",
        upstream=_NO_FLAGS_OF_PLUGINS,
        remove_when="general plugins can register arguments",
    ),
    Patch(
        f"{ARGUMENTS}:EngineArgs.create_engine_config",
        why="puts the settings or, for a checkpoint pool, connector and worker into the"
        " configuration, and refuses what does not go together with the plugin",
        upstream="general plugins are loaded before there is a configuration and never see it",
        remove_when="general plugins can look at a configuration",
    ),
)

BEGIN_SCHEDULER = Patch(
    f"{SCHEDULER}:Scheduler.__init__",
    why="a block policy alone needs no KV connector, with which hits would be shorter",
    upstream=_NO_CONNECTOR,
    remove_when=_PLUGGABLE_POLICY,
)
RESET_CONNECTOR_CACHE = Patch(
    f"{SCHEDULER}:Scheduler.reset_connector_cache",
    why="counts of a connector's own hits are reset with it, and there are none",
    upstream="Scheduler.reset_connector_cache of vLLM 0.32",
    remove_when=_PLUGGABLE_POLICY,
)
BEGIN_METRICS = Patch(
    f"{STATS}:KVConnectorProm.__init__",
    why="what a scheduler without a connector counts is shown by /metrics",
    upstream="KVConnectorProm of vLLM 0.32 asks the configured connector for its metrics",
    remove_when="a plugin can add metrics of the scheduler to vLLM's",
)
LOG_CONNECTOR = Patch(
    f"{STATS}:KVConnectorLogging.observe",
    why="the same counts pass vLLM's log, which knows none without a connector",
    upstream="KVConnectorLogging of vLLM 0.32 has no `connector_cls` then",
    remove_when="a plugin can add metrics of the scheduler to vLLM's",
)

END_PREFILL_CHUNK = Patch(
    f"{SCHEDULER}:Scheduler._mamba_block_aligned_split",
    why="a state exists only where a prefill chunk ends: chunks end where one is wanted",
    upstream="Scheduler._mamba_block_aligned_split of vLLM 0.32 ends chunks where the token budget"
    " does; exact boundary states inside a chunk: vllm#51358 (0.29), vllm#57329 (Mamba2, 0.32)",
    remove_when="all recurrent layers export states from inside a chunk",
)

UPDATE_FROM_OUTPUT = Patch(
    f"{SCHEDULER}:Scheduler.update_from_output",
    why="what was computed from a state that was not the request's own is never handed on",
    upstream="Scheduler._handle_invalid_blocks of vLLM 0.32 knows no load error of a block where a"
    " model has several groups of layers; `failed_recving` is for loads that a request waits for",
    remove_when="a connector can report a block that it could not load for a hybrid model",
)

GET_COMPUTED_BLOCKS = Patch(
    f"{MANAGER}:KVCacheManager.get_computed_blocks",
    why="a hit goes as far as a state in a checkpoint allows; lookups are counted",
    upstream="`supports_divergent_local_hybrid_hits` lets a connector restore states where the KV"
    " reaches deeper, and discards the deeper hit when no tokens come from outside; vllm#52774"
    " (open) asks a tier for the one missing state",
    remove_when="a connector may bring a missing state for a hit in local blocks",
)
ALLOCATE_SLOTS = Patch(
    f"{MANAGER}:KVCacheManager.allocate_slots",
    why="the queue must know whose blocks are handed out: those of a request that resumes from"
    " most of its prompt are protected",
    upstream="BlockPool.get_new_blocks of vLLM 0.32 does not know the request",
    remove_when=_PLUGGABLE_POLICY,
)
FREE_QUEUE = Patch(
    f"{POOL}:BlockPool.free_block_queue",
    why="the order of this queue is the block policy",
    upstream="FreeKVCacheBlockQueue of vLLM 0.32 is LRU; vllm#40270 (open), vllm#42799 (closed)",
    remove_when=_PLUGGABLE_POLICY,
)
BLOCK_MAP = Patch(
    f"{POOL}:BlockPool.cached_block_hash_to_block",
    why="the queue has to know which keys are cached in other blocks, too, without asking Python",
    upstream="BlockHashToBlockMap of vLLM 0.32",
    remove_when=_PLUGGABLE_POLICY,
)
TOUCH = Patch(
    f"{POOL}:BlockPool.touch",
    why="all blocks of a hit leave the queue in one call",
    upstream="BlockPool.touch of vLLM 0.32 removes them one by one",
    remove_when=_PLUGGABLE_POLICY,
)
RESET_PREFIX_CACHE = Patch(
    f"{POOL}:BlockPool.reset_prefix_cache",
    why="states of old weights must never be restored",
    upstream="BlockPool.reset_prefix_cache of vLLM 0.32 makes a new map and queue, and no connector"
    " hears of it unless the user asks for that",
    remove_when=_RESET_EVENT,
)
EVICT_BLOCKS = Patch(
    f"{POOL}:BlockPool.evict_blocks",
    why="a block that lost its hash goes first, and a state whose KV has gone is worth nothing",
    upstream="BlockPool.evict_blocks of vLLM 0.32 leaves such a block where it is",
    remove_when=_RESET_EVENT,
)
CACHE_PARTIAL_BLOCK = Patch(
    f"{POOL}:BlockPool.cache_partial_block",
    why="a state that a request resumes from is named once more and then counts as one of this"
    " step: of the requests that share it one is admitted a step, and all others wait behind them",
    upstream="MambaManager._cache_partial_tail_block of vLLM 0.32 adds the name to"
    " cached_blocks_this_step, whoever wrote the state",
    remove_when="vLLM defers a hit only where the state is written in the same step",
)
REMOVE_SKIPPED_BLOCKS = Patch(
    f"{MANAGER}:KVCacheManager.remove_skipped_blocks",
    why="a dry run must leave the order in which blocks are freed as it is without a connector",
    upstream="Scheduler._connector_finished of vLLM 0.32 frees some blocks first, through this"
    " method, which nothing else calls",
    remove_when="vLLM frees the blocks of a request in one go, with any connector",
)

PATCHES = (
    *ALWAYS,
    BEGIN_SCHEDULER,
    RESET_CONNECTOR_CACHE,
    BEGIN_METRICS,
    LOG_CONNECTOR,
    END_PREFILL_CHUNK,
    UPDATE_FROM_OUTPUT,
    GET_COMPUTED_BLOCKS,
    ALLOCATE_SLOTS,
    FREE_QUEUE,
    BLOCK_MAP,
    TOUCH,
    RESET_PREFIX_CACHE,
    EVICT_BLOCKS,
    CACHE_PARTIAL_BLOCK,
    REMOVE_SKIPPED_BLOCKS,
)
