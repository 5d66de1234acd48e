"""vLLM's cache layer on its own: the real scheduler and block pool, without a model.

Three groups of recurrent states and one of attention, in blocks of 16 tokens. What the scheduler
plans is taken as done. The names and calls are those of vLLM 0.32.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from statecache_vllm.seams import load

__all__ = ["BLOCK", "CacheLayer"]

# Torch is the engine's, and not there where this package is only checked.
torch: Any = import_module("torch")

BLOCK = 16
_GROUPS = 3
# What vLLM reads of a model before it loads one: a small hybrid.
_MODEL = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "max_position_embeddings": 1_048_576,
    "mlp_only_layers": [],
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
    "vocab_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def write_model(folder: Path) -> None:
    """Write the configuration of the model to `folder`."""
    (folder / "config.json").write_text(json.dumps(_MODEL))


def _groups() -> list[Any]:
    specs = load("vllm.v1.kv_cache_interface")
    state = specs.MambaSpec(
        block_size=BLOCK,
        shapes=((3, 512), (4, 64, 64)),
        dtypes=(torch.bfloat16, torch.float32),
        mamba_cache_mode="align",
    )
    attention = specs.FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=4, head_size=64, dtype=torch.bfloat16
    )
    groups = [specs.KVCacheGroupSpec([f"state.{i}"], state) for i in range(_GROUPS)]
    return [*groups, specs.KVCacheGroupSpec(["attention"], attention)]


class CacheLayer:
    """A scheduler over `blocks` blocks; `plugin` holds settings by name, None leaves it off.

    A request has `longest` tokens at most, of which `budget` are computed in a step. vLLM keeps
    a state every `retention` tokens, if that is not 0.
    """

    def __init__(
        self,
        model: Path,
        blocks: int,
        *,
        budget: int,
        longest: int,
        retention: int,
        plugin: dict[str, Any] | None,
    ) -> None:
        load("vllm.plugins").load_general_plugins()
        config: dict[str, Any] = {}
        if plugin is not None:
            config = {f"statecache_{name}": value for name, value in plugin.items()}
            config["kv_cache_plugin"] = "statecache"
        self._config = (
            load("vllm.engine.arg_utils")
            .EngineArgs(
                model=str(model),
                dtype="bfloat16",
                skip_tokenizer_init=True,
                block_size=BLOCK,
                max_model_len=longest,
                max_num_seqs=4,
                max_num_batched_tokens=budget,
                enable_prefix_caching=True,
                prefix_cache_retention_interval=retention,
                additional_config=config,
            )
            .create_engine_config()
        )
        self._config.cache_config.num_gpu_blocks = blocks
        self._scheduler = self._build_scheduler(blocks)
        utils = load("vllm.v1.core.kv_cache_utils")
        digest = load("vllm.utils.hashing").get_hash_fn_by_name("sha256")
        utils.init_none_hash(digest)
        self._hasher = utils.get_request_block_hasher(BLOCK, digest)
        self._count = 0
        self._cached: dict[str, int] = {}

    def _build_scheduler(self, blocks: int) -> Any:
        kv = load("vllm.v1.kv_cache_interface").KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=_groups(),
            prefix_cache_retention_interval=(
                self._config.cache_config.prefix_cache_retention_interval
            ),
        )
        return load("vllm.v1.core.sched.scheduler").Scheduler(
            vllm_config=self._config,
            kv_cache_config=kv,
            structured_output_manager=load("vllm.v1.structured_output").StructuredOutputManager(
                self._config
            ),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=False,
        )

    def ask(self, prompt: Sequence[int]) -> tuple[int, int]:
        """Serve one request alone; return how many tokens had KV, and how many were reused."""
        self._count += 1
        name = f"r{self._count}"
        sampling = load("vllm").SamplingParams(max_tokens=1, ignore_eos=True)
        sampling.update_from_generation_config({}, 0)
        request = load("vllm.v1.request").Request(
            request_id=name,
            prompt_token_ids=list(prompt),
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self._hasher,
        )
        resident = self._resident(request)
        self._scheduler.add_request(request)
        while self._scheduler.has_unfinished_requests():
            self._step()
        return resident, self._cached.pop(name)

    @property
    def evicted_and_skipped(self) -> tuple[int | None, int | None]:
        """States of a checkpoint pool that went, and that found no slot; None without one."""
        ours = getattr(self._scheduler.connector, "scheduler_side", None)
        checkpoints = None if ours is None else ours.checkpoints
        if checkpoints is None:
            return None, None
        return checkpoints.counts.evicted, checkpoints.counts.skipped

    def _resident(self, request: Any) -> int:
        """Return the tokens whose KV is there; the last token of a prompt is always computed."""
        pool = self._scheduler.kv_cache_manager.block_pool
        whole = (request.num_tokens - 1) // BLOCK
        for number, block_hash in enumerate(request.block_hashes[:whole]):
            if pool.get_cached_block(block_hash, [_GROUPS]) is None:
                return number * BLOCK
        return int(whole) * BLOCK

    def _step(self) -> None:
        """One step of the engine; every store is reported as done."""
        outputs = load("vllm.v1.outputs")
        planned = self._scheduler.schedule()
        for new in planned.scheduled_new_reqs:
            self._cached[new.req_id] = new.num_computed_tokens
        names = list(planned.num_scheduled_tokens)
        if not names:
            raise RuntimeError("a request does not fit the blocks")
        sampled = []
        for name in names:
            request = self._scheduler.requests[name]
            done = request.num_computed_tokens >= request.num_tokens
            sampled.append([7] if done else [])
        report = None
        commands = planned.kv_connector_metadata
        if commands is not None and commands.stores:
            from statecache_vllm.connector import Stored

            stored = Stored(tuple(copy.state for copy in commands.stores), ())
            report = outputs.KVConnectorOutput(kv_connector_worker_meta=stored)
        self._scheduler.update_from_output(
            planned,
            outputs.ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: at for at, name in enumerate(names)},
                sampled_token_ids=sampled,
                kv_connector_output=report,
            ),
        )
