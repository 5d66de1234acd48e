"""VLLM's model runner V2 around the plugin's real halves, without a GPU and without a model.

Its own `ActiveKVConnector` calls the plugin's connector, around a forward that only knows which
state belongs to which tokens.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from scheduled import GROUPS, Run
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.worker.gpu import kv_connector as v2

from statecache.checkpoint import stream_order
from statecache_vllm import seams
from statecache_vllm import worker_side as worker
from statecache_vllm.connector import StateCacheConnector
from support.host_waits import SlowDevice

# Before vLLM 0.33 its V2 reports after the store, drafts or not.
DEFERS = hasattr(v2.ActiveKVConnector, "finalize_step")
every_order = pytest.mark.parametrize("drafts", [False, True] if DEFERS else [False])

_NAMES = {
    "restore": "restore",
    "wait_for_save": "store",
    "build_connector_worker_meta": "report",
}


class RunnerV2:
    """What V2 does with a step: blocks zeroed and copied, then the connector, then the forward.

    `tensors` are those of each group: what a block of it holds. `log` is what was called. The
    device comes to the events of a step `lag` steps later. While `poisoned`, what is stored of the
    first group holds a NaN that the next forward does not see.
    """

    def __init__(self, run: Run, *, drafts: bool, lag: int = 0) -> None:
        self.run, self.drafts, self.lag = run, drafts, lag
        self.log: list[str] = []
        self.poisoned = False
        self.block = run.block
        self.device = SlowDevice(lag)
        shapes = ((3, 512), torch.bfloat16), ((4, 64, 64), torch.float32)
        self.tensors = [
            [torch.zeros(len(run.pool.blocks), *shape, dtype=dtype) for shape, dtype in shapes]
            for _ in range(GROUPS)
        ]

    def state(self, name: str, tokens: int) -> tuple[float, float]:
        """Two numbers that stand for the state after so many tokens.

        Bfloat16 holds the first and int8 the second, as 127 times a small scale.
        """
        known = self.run.scheduler.requests[name].all_token_ids[:tokens]
        summed = zlib.crc32(repr(list(known)).encode())
        return float(summed % 251), 127.0 * (1 + summed // 251 % 255)

    def block_of(self, name: str, group: int, tokens: int) -> int:
        ids = self.run.scheduler.kv_cache_manager.get_block_ids(name)[group]
        return int(ids[-(-tokens // self.block) - 1])

    def execute_model(self, step: Any) -> Any:
        """A step up to the samples; `finish` is the rest."""
        connector = self.run.connector_v2
        for at in step.new_block_ids_to_zero or ():
            for group in self.tensors:
                for kind in group:
                    kind[at].zero_()
        self.log.append("blocks")
        if step.total_num_scheduled_tokens == 0:
            return connector.no_forward(step).kv_connector_output
        connector.pre_forward(step)
        self.log.append("forward")
        for name, tokens in step.num_scheduled_tokens.items():
            self.compute(name, tokens)
        connector.finish_forward()
        deferred = {"defer_finalize": True} if self.drafts else {}
        said = connector.post_forward(step.finished_req_ids, **deferred)
        if self.drafts:
            self.log.append("draft")
            connector.finalize_step()
        return said

    def compute(self, name: str, tokens: int) -> None:
        """Go on from the state of the request, which must be its own."""
        end = self.run.scheduler.requests[name].num_computed_tokens
        start = end - tokens
        for group, kinds in enumerate(self.tensors):
            if start:
                at = self.block_of(name, group, start)
                found = [{*kind[at].flatten().float().tolist()} for kind in kinds]
                assert found == [{number} for number in self.state(name, start)]
            for kind, number in zip(kinds, self.state(name, end), strict=True):
                kind[self.block_of(name, group, end)].fill_(number)

    @contextlib.contextmanager
    def poison(self) -> Iterator[None]:
        """A NaN in every temporal state of the first group, if there is to be one."""
        rows = self.tensors[0][1][:, 0, 0, 0]
        kept = rows.clone()
        if self.poisoned:
            rows.fill_(math.nan)
        yield
        rows.copy_(kept)


@contextlib.contextmanager
def started(
    monkeypatch: pytest.MonkeyPatch,
    model: Path,
    *,
    drafts: bool,
    mode: str = "native",
    lag: int = 0,
    **more: Any,
) -> Iterator[tuple[Run, RunnerV2]]:
    """A scheduler and a worker of V2 on it; `more` goes to `Run`."""
    plugin = {"checkpoints": mode, "checkpoint_slots": 24}
    run = Run(model, **{"blocks": 100, "plugin": plugin, "budget": 64} | more)
    runner = RunnerV2(run, drafts=drafts, lag=lag)
    layers = {f"state.{group}": kinds for group, kinds in enumerate(runner.tensors)}
    monkeypatch.setattr(seams, "state_tensors", lambda _, names: [layers[n] for n in names])
    ours = StateCacheConnector(run.config, KVConnectorRole.WORKER, run.scheduler.kv_cache_config)
    for method in _NAMES:
        _noted(monkeypatch, runner.log, ours, method)
    save = ours.wait_for_save

    def wait_for_save() -> None:
        with runner.poison():
            save()

    monkeypatch.setattr(ours, "wait_for_save", wait_for_save)
    monkeypatch.setattr(v2, "get_kv_transfer_group", lambda: ours)
    monkeypatch.setattr(seams, "transfer_group", lambda: ours)
    monkeypatch.setattr(seams, "worker_base", lambda **_: RunnerV2)
    worker._worker.cache_clear()
    run.connector_v2 = v2.ActiveKVConnector(run.config, {})
    monkeypatch.setattr(stream_order, "event_behind", runner.device.event_behind)
    execute = worker._worker("CheckpointWorker").execute_model

    def step() -> Any:
        planned = run.schedule()
        runner.device.begin_step()
        run.report(planned, execute(runner, planned) or v2.KVConnectorOutput())
        return planned

    run.step = step
    try:
        yield run, runner
    finally:
        worker._worker.cache_clear()


def _noted(monkeypatch: pytest.MonkeyPatch, log: list[str], ours: Any, method: str) -> None:
    original, name = getattr(ours, method), _NAMES[method]

    def call(*args: Any) -> Any:
        if name != "restore" or args[0].restores:
            log.append(name)
        return original(*args)

    monkeypatch.setattr(ours, method, call)
