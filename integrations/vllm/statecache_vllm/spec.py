"""What the plugin knows of vLLM. Importing it imports neither vLLM nor the adapter's other half."""

from __future__ import annotations

from statecache.engine.spec import EngineCounters, EngineSpec
from statecache_vllm.patches import PATCHES
from statecache_vllm.seam_table import SEAMS, TESTED, VIEWS
from statecache_vllm.seams import engine_version

__all__ = ["SPEC"]

SPEC = EngineSpec(
    name="vllm",
    title="vLLM",
    plugin_group="vllm.general_plugins",
    disable_variable="VLLM_PLUGINS",
    tested_versions=TESTED,
    seams=SEAMS,
    views=VIEWS,
    patches=PATCHES,
    version=engine_version,
    own_settings=("block_policy", "checkpoint_interval", "checkpoint_memory"),
    extensions={"blocks": "the native queue of vLLM's blocks"},
    counters=EngineCounters(
        prefix="vllm:",
        requests="vllm:request_success_total",
        prompt_tokens="vllm:prompt_tokens_total",
        hit_tokens="vllm:prompt_tokens_cached_total",
    ),
    metrics_flag="without --disable-log-stats",
    slots_per_request=2,
    sizing="statecache_vllm.sizing:VllmSplits",
    cache_driver="statecache_vllm.bench.cache_driver",
    arms={
        "native": ("lru", "gds", "learned"),
        "int8": ("lru", "gds", "learned"),
        "shared": ("stock", "reuse"),
    },
    # A state every `chunk` tokens, or where vLLM keeps one itself.
    arm_admissions=("dense", "branch-points"),
    state_blocks=3,
    arms_note=(
        "vLLM alone keeps states and KV in one pool, and sets states at prompt ends and where known"
        " prefixes end; its checkpoint pool comes out of the same bytes."
    ),
)
