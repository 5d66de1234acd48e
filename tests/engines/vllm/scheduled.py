"""The real scheduler and block pool of vLLM without a model: what it plans is taken as done."""

from __future__ import annotations

import dataclasses
import inspect
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import engine  # noqa: F401  (sets vLLM's switches before it is imported)
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints
from vllm.plugins import load_general_plugins
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    make_block_hash_with_group_id,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

_HASH = get_hash_fn_by_name("sha256")
GROUPS = 3


class Drafter(NamedTuple):
    """A drafter of so many tokens a step; with `own_group` its KV lies in a group of its own."""

    method: str = "mtp"
    tokens: int = 2
    own_group: bool = False

    @property
    def config(self) -> dict[str, Any]:
        more = {} if self.method != "ngram" else {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
        return {"method": self.method, "num_speculative_tokens": self.tokens, **more}


def _groups(
    block: int,
    attention_block: int | None = None,
    alignment: int | None = None,
    drafter: Drafter | None = None,
) -> list[KVCacheGroupSpec]:
    state = MambaSpec(
        block_size=block,
        shapes=((3, 512), (4, 64, 64)),
        dtypes=(torch.bfloat16, torch.float32),
        mamba_cache_mode="align",
        num_prefill_checkpoint_blocks=int(alignment is not None),
        prefill_checkpoint_alignment=alignment,
        num_speculative_blocks=drafter.tokens if drafter else 0,
    )
    attention = FullAttentionSpec(
        block_size=attention_block or block, num_kv_heads=4, head_size=64, dtype=torch.bfloat16
    )
    groups = [KVCacheGroupSpec([f"state.{i}"], state) for i in range(GROUPS)]
    groups.append(KVCacheGroupSpec(["attention"], attention))
    if drafter is not None and drafter.own_group:
        own = dataclasses.replace(attention, num_kv_heads=2, head_size=128)
        groups.append(KVCacheGroupSpec(["drafter"], own))
    groups[-1].is_eagle_group = drafter is not None and drafter.method == "mtp"
    return groups


class Shadow:
    """What a worker's state blocks and slots would hold, to see what requests resume from.

    In the order of a real step: restores, then the forward, then stores.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._slots: dict[int, bytes] = {}  # the hash of the state in each slot
        self._blocks: dict[int, bytes | None] = {}
        self.resumed = 0

    def before(self) -> None:
        """Before `schedule`: a block that is cached now holds what its key says."""
        self._blocks = {block.block_id: block.block_hash for block in self._run.pool.blocks}

    def after(self, planned: Any) -> None:
        """After `schedule`: every request that resumes does so from its own state."""
        commands = planned.kv_connector_metadata
        restores = [] if commands is None else commands.restores
        restored = {at: self._slots[copy.slot] for copy in restores for at in copy.blocks}
        cached = planned.scheduled_cached_reqs
        begun = [
            (request.req_id, request.num_computed_tokens) for request in planned.scheduled_new_reqs
        ]
        begun += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        fresh = cached.resumed_req_ids | {request.req_id for request in planned.scheduled_new_reqs}
        for name, tokens in begun:
            if name in fresh and tokens:
                self._check(name, tokens, restored)
        if commands is not None:
            for copy in commands.stores:
                self._slots[copy.slot] = self._run.pool.blocks[copy.blocks[0]].block_hash[:-4]

    def _check(self, name: str, tokens: int, restored: dict[int, bytes]) -> None:
        self.resumed += 1
        block, manager = self._run.block, self._run.scheduler.kv_cache_manager
        assert tokens % block == 0
        hashes = self._run.scheduler.requests[name].block_hashes
        wanted = hashes[tokens // manager.block_pool.hash_block_size - 1]
        for group in range(GROUPS):
            at = manager.get_block_ids(name)[group][tokens // block - 1]
            key = make_block_hash_with_group_id(wanted, group)
            assert restored.get(at) == wanted or self._blocks[at] == key


class Run:
    """A scheduler of one model with three groups of states and one of attention.

    With an `alignment` its layers write a state inside a chunk, so many tokens from its begin on.
    """

    def __init__(
        self,
        model: Path,
        *,
        blocks: int,
        block: int = 16,
        hash_block: int | None = None,
        plugin: dict[str, Any] | None = None,
        budget: int = 8192,
        requests: int = 8,
        length: int = 4096,
        alignment: int | None = None,
        attention_block: int | None = None,
        drafter: Drafter | None = None,
        overlapped: bool = False,
        **more: Any,
    ) -> None:
        load_general_plugins()
        if drafter is not None:
            more["speculative_config"] = drafter.config
        config: dict[str, Any] = {}
        if plugin is not None:
            config = {f"statecache_{name}": value for name, value in plugin.items()}
            config["kv_cache_plugin"] = "statecache"
        arguments = EngineArgs(
            model=str(model),
            dtype="bfloat16",
            block_size=block,
            max_model_len=length,
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
            kv_cache_groups=_groups(block, attention_block or block, alignment, drafter),
            prefix_cache_retention_interval=self.config.cache_config.prefix_cache_retention_interval,
        )
        self.overlapped = overlapped
        self._refuses = (plugin or {}).get("checkpoints") == "int8"  # others report no store
        self.unreported: tuple[int, ...] = ()
        self.scheduler = (AsyncScheduler if overlapped else Scheduler)(
            vllm_config=self.config,
            kv_cache_config=kv,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=math.lcm(block, attention_block or block),
            hash_block_size=hash_block or block,
            log_stats=False,
        )
        init_none_hash(_HASH)
        ahead = getattr(self.config, "num_hash_lookahead_tokens", 0)  # from vLLM 0.33 on
        more_hashed = (ahead,) if ahead else ()
        self._hasher = get_request_block_hasher(hash_block or block, _HASH, *more_hashed)
        self._count = 0
        self.block = block
        self.shadow = Shadow(self)
        self.cached: dict[str, int] = {}
        self.chunk_ends: dict[str, list[int]] = {}
        self.restores: list[Any] = []
        self.allocations: list[int] = []

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def scheduler_side(self) -> Any:
        return self.scheduler.connector.scheduler_side

    def add(
        self, prompt: Sequence[int], tokens: int = 1, stop: Sequence[int] = (), **more: Any
    ) -> str:
        """Add a request that ends at one of the tokens `stop`; `more` goes to vLLM's `Request`."""
        self._count += 1
        name = f"r{self._count}"
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, stop_token_ids=list(stop))
        sampling.update_from_generation_config({}, 0)
        request = Request(
            request_id=name,
            prompt_token_ids=list(prompt),
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self._hasher,
            **more,
        )
        self.scheduler.add_request(request)
        return name

    def step(self) -> Any:
        """One step of the engine; every store of the one before is reported as done."""
        planned = self.schedule()
        self.report(planned)
        return planned

    def schedule(self) -> Any:
        """The first half of a step: what the workers are asked to do."""
        self.shadow.before()
        planned = self.scheduler.schedule()
        self.shadow.after(planned)
        for request in planned.scheduled_new_reqs:
            self.cached[request.req_id] = request.num_computed_tokens
        return planned

    def report(self, planned: Any, said: KVConnectorOutput | None = None) -> None:
        """The second half of a step: the workers have done it, and `said` what became of it."""
        names = list(planned.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = self.scheduler.requests.get(name)
            if request is None:  # aborted in the meantime
                sampled.append([])
                continue
            end = request.num_computed_tokens
            self.chunk_ends.setdefault(name, []).append(end)
            sampled.append([] if end < request.num_tokens else [7])
        report = said
        commands = planned.kv_connector_metadata
        if commands is not None:
            self.restores += commands.restores
            due, self.unreported = self.unreported, tuple(copy.state for copy in commands.stores)
            if due and self._refuses and said is None:
                from statecache_vllm.connector import Stored

                report = KVConnectorOutput(kv_connector_worker_meta=Stored(due))
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=report,
        )
        self.scheduler.update_from_output(planned, output)

    def finish(self, limit: int = 10_000) -> None:
        """Run until nothing is left to do."""
        while self.scheduler.has_unfinished_requests():
            self.step()
            limit -= 1
            assert limit > 0

    def ask(self, prompt: Sequence[int], tokens: int = 1, **more: Any) -> int:
        """One request on its own; returns its cached tokens."""
        name = self.add(prompt, tokens, **more)
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


def exported(
    run: Run, end: int, count: int, alignment: int | None, *, drop_block: bool
) -> tuple[int, int]:
    """Where layers leave a state inside a chunk of `count` tokens up to `end`: tokens, column.

    0 and -1 where they leave none. vLLM 0.31 does not tell hashed units from those of a hit.
    """
    first = run.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
    known = inspect.signature(compute_mamba_prefill_checkpoints).parameters
    name = "cache_hit_alignment_tokens"
    more = {name: first.cache_hit_alignment_tokens} if name in known else {}
    (inside,), (column,) = compute_mamba_prefill_checkpoints(
        [end], [count], run.pool.hash_block_size, run.block, alignment, drop_block, **more
    )
    return inside, column


def words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, 300) for _ in range(count)]


def without_states(run: Run) -> None:
    """Every block of a state loses its hash: only checkpoints can serve what KV is there for."""
    run.pool.evict_blocks(
        {b.block_id for b in run.pool.blocks if b.block_hash and b.block_hash[-1] < GROUPS}
    )


def traffic(run: Run, seed: int, steps: int) -> Iterator[None]:
    """Random requests that share prefixes, some aborted, under pressure; yields after each step."""
    rng = random.Random(seed)
    prefixes = [words(rng, rng.randint(16, 160)) for _ in range(6)]
    open_requests: list[str] = []
    for _ in range(steps):
        if rng.random() < 0.35 and len(open_requests) < 12:
            prompt = rng.choice(prefixes) + words(rng, rng.randint(1, 40))
            if rng.random() < 0.3:
                prefixes[rng.randrange(len(prefixes))] = prompt[:200]
            open_requests.append(run.add(prompt, tokens=rng.randint(1, 20)))
        if open_requests and rng.random() < 0.02:
            name = open_requests.pop(rng.randrange(len(open_requests)))
            if name in run.scheduler.requests:
                run.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
        if rng.random() < 0.01:
            run.pool.evict_blocks({rng.randrange(1, len(run.pool.blocks)) for _ in range(3)})
        run.step()
        open_requests = [name for name in open_requests if name in run.scheduler.requests]
        yield
    run.finish()
