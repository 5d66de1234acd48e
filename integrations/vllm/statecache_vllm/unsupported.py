"""Ways to run vLLM that this release does not support together with the plugin.

A second KV connector could be put beside ours with `MultiConnector`. It is refused, because of what
vLLM 0.32 does then and because no such pair can be tried on a CPU:

- A hybrid model takes only connectors that support several cache groups (`SupportsHMA`).
  `ExampleConnector`, `LMCacheConnectorV1`, `FlexKVConnectorV1` and `HF3FSKVConnector` do not.
  `OffloadingConnector` and `SimpleCPUOffloadConnector` do, and copy through CUDA streams; NIXL,
  Mooncake and MoRIIO need their own libraries and a second server. `DecodeBenchConnector` and
  `ExampleHiddenStatesConnector` run anywhere, and neither brings KV.
- When the other connector has tokens beyond our hit, `add_local_computed_blocks` gives up the block
  of a recurrent group that a restore was promised for, since its state lies before those tokens.
  The promise would have to be withdrawn, and the state is then the other connector's to bring;
  nothing that runs here can show that the tokens stay the same.
- A connector that receives defers the frees that the block policy is made for, as soon as batches
  overlap (`Scheduler.defer_block_free`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from statecache.errors import SettingsError
from statecache_vllm.views import EngineArgs, SpeculativeConfig, VllmConfig

_Test = Callable[[Any], bool]


def _given(value: object) -> bool:
    return value is not None


def _above_one(value: object) -> bool:
    return isinstance(value, int) and value > 1


def _extracts(drafting: SpeculativeConfig | None) -> bool:
    return drafting is not None and drafting.method == "extract_hidden_states"


def _drafts_from_states(drafting: SpeculativeConfig | None) -> bool:
    if drafting is None or drafting.method != "draft_model":
        return False
    draft = drafting.draft_model_config
    return draft is not None and draft.is_hybrid


# By the field of `EngineArgs` (vLLM 0.32.0): what is refused, and how the line calls it.
REFUSED: dict[str, tuple[_Test, str]] = {
    "kv_transfer_config": (_given, "--kv-transfer-config (KV transfer, PD disaggregation)"),
    "ec_transfer_config": (_given, "--ec-transfer-config"),
    "kv_offloading_size": (_given, "--kv-offloading-size"),
    "pipeline_parallel_size": (_above_one, "pipeline parallelism (--pipeline-parallel-size)"),
    "data_parallel_size": (_above_one, "data parallelism (--data-parallel-size)"),
    "decode_context_parallel_size": (_above_one, "--decode-context-parallel-size"),
    "prefill_context_parallel_size": (_above_one, "--prefill-context-parallel-size"),
    "enable_sleep_mode": (bool, "sleep mode (--enable-sleep-mode)"),
    "disable_hybrid_kv_cache_manager": (bool, "--disable-hybrid-kv-cache-manager"),
    "scheduler_cls": (_given, "--scheduler-cls"),
    # A worker keeps the experts of a block by its own rules, which no restore was tried with.
    "enable_return_routed_experts": (bool, "--enable-return-routed-experts"),
}


def refuse(engine_args: EngineArgs, *, pool: bool) -> None:
    """Raise `SettingsError` if `engine_args` asks for something that is not supported."""
    for field, (asked_for, name) in REFUSED.items():
        if asked_for(getattr(engine_args, field)):
            raise not_supported(name)
    if engine_args.enable_prefix_caching is False:
        raise not_supported("--no-enable-prefix-caching (nothing would be cached)")
    if pool and engine_args.worker_cls != "auto":
        raise not_supported("--worker-cls beside a checkpoint pool")


# As above, by what vLLM made of all its flags, of the model and of the environment: it also takes
# --spec-method, models that bring their own draft, and VLLM_DP_SIZE. The drafters of vLLM 0.32 know
# attention alone: in states of their own a rejected draft would stay.
_IN_CONFIG: tuple[tuple[str, _Test, str], ...] = (
    ("parallel_config.data_parallel_size", _above_one, REFUSED["data_parallel_size"][1]),
    ("aux_output_config.enabled", bool, REFUSED["enable_return_routed_experts"][1]),
    (
        "speculative_config",
        _extracts,
        "the speculative method extract_hidden_states (it needs a KV connector of its own)",
    ),
    (
        "speculative_config",
        _drafts_from_states,
        "a draft model with recurrent states (a rejected draft would stay in them)",
    ),
)


def refuse_config(config: VllmConfig) -> None:
    """Raise `SettingsError` if vLLM's configuration holds something that is not supported."""
    for path, asked_for, name in _IN_CONFIG:
        if asked_for(operator.attrgetter(path)(config)):
            raise not_supported(name)


def not_supported(name: str) -> SettingsError:
    """Return the error for something that does not go together with the plugin."""
    return SettingsError(f"{name} is not supported with --kv-cache-plugin statecache")
