"""The real scheduler and block pool of vLLM without a model: what it plans is taken as done."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import engine  # noqa: F401  (sets vLLM's switches before it is imported)
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

_HASH = get_hash_fn_by_name("sha256")
GROUPS = 3


def _groups(block: int) -> list[KVCacheGroupSpec]:
    state = MambaSpec(
        block_size=block,
        shapes=((3, 512), (4, 64, 64)),
        dtypes=(torch.bfloat16, torch.float32),
        mamba_cache_mode="align",
    )
    attention = FullAttentionSpec(
        block_size=block, num_kv_heads=4, head_size=64, dtype=torch.bfloat16
    )
    groups = [KVCacheGroupSpec([f"state.{i}"], state) for i in range(GROUPS)]
    return [*groups, KVCacheGroupSpec(["attention"], attention)]


class Run:
    """A scheduler of one model with three groups of states and one of attention."""

    def __init__(
        self,
        model: Path,
        *,
        blocks: int,
        block: int = 16,
        plugin: dict[str, Any] | None = None,
        budget: int = 8192,
        requests: int = 8,
        **more: Any,
    ) -> None:
        load_general_plugins()
        config: dict[str, Any] = {}
        if plugin is not None:
            config = {f"statecache_{name}": value for name, value in plugin.items()}
            config["kv_cache_plugin"] = "statecache"
        arguments = EngineArgs(
            model=str(model),
            dtype="bfloat16",
            block_size=block,
            max_model_len=4096,
            max_num_seqs=requests,
            max_num_batched_tokens=budget,
            enable_prefix_caching=True,
            additional_config=config,
            **more,
        )
        self.config = arguments.create_engine_config()
        self.config.cache_config.num_gpu_blocks = blocks
        kv = KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=_groups(block),
            prefix_cache_retention_interval=self.config.cache_config.prefix_cache_retention_interval,
        )
        self.scheduler = Scheduler(
            vllm_config=self.config,
            kv_cache_config=kv,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=block,
            hash_block_size=block,
            log_stats=False,
        )
        init_none_hash(_HASH)
        self._hasher = get_request_block_hasher(block, _HASH)
        self._count = 0
        self.cached: dict[str, int] = {}
        self.chunk_ends: dict[str, list[int]] = {}
        self.restores: list[Any] = []
        self.allocations: list[int] = []

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def planner(self) -> Any:
        return self.scheduler.connector.planner

    def add(self, prompt: Sequence[int], tokens: int = 1, salt: str | None = None) -> str:
        self._count += 1
        name = f"r{self._count}"
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        sampling.update_from_generation_config({}, 0)
        request = Request(
            request_id=name,
            prompt_token_ids=list(prompt),
            sampling_params=sampling,
            pooling_params=None,
            cache_salt=salt,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)
        return name

    def step(self) -> Any:
        """One step of the engine; every store is reported as done."""
        planned = self.scheduler.schedule()
        for one in planned.scheduled_new_reqs:
            self.cached[one.req_id] = one.num_computed_tokens
        names = list(planned.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = self.scheduler.requests[name]
            end = request.num_computed_tokens
            self.chunk_ends.setdefault(name, []).append(end)
            sampled.append([] if end < request.num_tokens else [7])
        report = None
        commands = planned.kv_connector_metadata
        if commands is not None:
            self.restores += commands.restores
            if commands.stores:
                from statecache_vllm.connector import Stored

                stored = Stored(tuple(state for state, _, _ in commands.stores), ())
                report = KVConnectorOutput(kv_connector_worker_meta=stored)
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=report,
        )
        self.scheduler.update_from_output(planned, output)
        return planned

    def finish(self, limit: int = 10_000) -> None:
        """Run until nothing is left to do."""
        while self.scheduler.has_unfinished_requests():
            self.step()
            limit -= 1
            assert limit > 0

    def ask(self, prompt: Sequence[int], tokens: int = 1) -> int:
        """One request on its own; returns its cached tokens."""
        name = self.add(prompt, tokens)
        self.finish()
        return self.cached[name]

    def check(self) -> None:
        """No block is lost, none is twice in the queue, counts are equal."""
        pool = self.pool
        queue = pool.free_block_queue
        free = [block.block_id for block in queue.get_all_free_blocks()]
        assert len(free) == len(set(free)) == queue.num_free_blocks
        expected = {b.block_id for b in pool.blocks if b.ref_cnt == 0 and not b.is_null}
        assert set(free) == expected
        for block in pool.blocks:
            if block.block_hash is not None:
                assert pool.cached_block_hash_to_block.contain(block.block_hash, block.block_id)


def words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, 300) for _ in range(count)]
