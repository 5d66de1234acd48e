"""What the plugin knows of SGLang. Importing it imports neither SGLang nor the other half."""

from __future__ import annotations

from statecache.engine.spec import EngineCounters, EngineSpec
from statecache_sglang.patches import HOOKS, PATCHES
from statecache_sglang.seam_table import RECORDING_SEAMS, SEAMS, TESTED, VIEWS
from statecache_sglang.seams import engine_version

__all__ = ["SPEC"]

_CAPS = (1, 3, 8)

SPEC = EngineSpec(
    name="sglang",
    title="SGLang",
    plugin_group="sglang.srt.plugins",
    disable_variable="SGLANG_PLUGINS",
    tested_versions=TESTED,
    seams=(*SEAMS, *RECORDING_SEAMS),
    version=engine_version,
    patches=PATCHES,
    hooks=HOOKS,
    views=VIEWS,
    refused={
        # Every prefill chunk's end is cached there (`stash_chunked_request` of SGLang 0.5.23), and
        # states inside a chunk do not exist.
        ("admission", "dense"): (
            "is for vllm only: SGLang caches a state at the end of every prefill chunk by itself"
            " (--chunked-prefill-size)"
        ),
        ("checkpoints", "native"): (
            "is for vllm only: SGLang's own pool keeps states as they are; leave it out"
        ),
    },
    counters=EngineCounters(
        prefix="sglang:",
        requests="sglang:num_requests_total",
        prompt_tokens="sglang:prompt_tokens_total",
        hit_tokens="sglang:cached_tokens_total",
        kv_pool_gib="sglang:kv_cache_memory_usage_gb",
        ranks_repeat=True,
    ),
    metrics_flag="with --enable-metrics",
    slots_per_request=5,
    sizing="statecache_sglang.sizing:SglangSplits",
    cache_driver="statecache_sglang.bench.cache_driver",
    arms={
        "native": ("stock", "lru", "gds", "learned"),
        "int8": ("stock", "lru", "gds", "learned"),  # stock: --enable-int8-mamba-checkpoint
    },
    arm_admissions=("dense", "ends", "aligned"),
    arm_keys=("states_per_path",),
    # With --mamba-max-states-per-path, which agentic recipes set, and with its int8 pool too.
    tuned={f"cap {states}": {"states_per_path": states} for states in _CAPS}
    | {f"int8 cap {states}": {"pool": "int8", "states_per_path": states} for states in _CAPS},
    arms_note=(
        "SGLang keeps states in slots of their own, a tenth of the memory here, sets one every"
        " 8,192 tokens and at each prompt's end, and drops the KV of a leaf with its state."
    ),
)
