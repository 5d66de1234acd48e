"""The order of restore, forward, store and report in vLLM's model runner V2, which needs a GPU.

Its own `ActiveKVConnector` calls the plugin's connector here, around a forward that only knows
which state belongs to which tokens. With a drafter V2 reports before it stores.
"""

import random
import zlib

import pytest
import torch
from scheduled import GROUPS, Run, traffic, without_states, words
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.worker.gpu import kv_connector as v2

from statecache_vllm import seams
from statecache_vllm import worker_side as worker
from statecache_vllm.connector import StateCacheConnector

POOL = {"checkpoints": "native", "checkpoint_slots": 24}


class RunnerV2:
    """What V2 does with a step: blocks zeroed and copied, then the connector, then the forward.

    `tensors` are those of each group: what a block of it holds. `log` is what was called.
    """

    def __init__(self, run, *, drafts):
        self.run, self.drafts, self.log = run, drafts, []
        blocks, block = len(run.pool.blocks), run.block
        self.block = block
        shapes = ((3, 512), torch.bfloat16), ((4, 64, 64), torch.float32)
        self.tensors = [
            [torch.zeros(blocks, *shape, dtype=dtype) for shape, dtype in shapes]
            for _ in range(GROUPS)
        ]

    def state(self, name, tokens):
        """Two numbers that stand for the state after so many tokens; bfloat16 holds the first."""
        known = self.run.scheduler.requests[name].all_token_ids[:tokens]
        summed = zlib.crc32(repr(list(known)).encode())
        return float(summed % 251), float(summed % 2**20)

    def block_of(self, name, group, tokens):
        ids = self.run.scheduler.kv_cache_manager.get_block_ids(name)[group]
        return ids[-(-tokens // self.block) - 1]

    def execute_model(self, step):
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

    def compute(self, name, tokens):
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


def names_of(method):
    return {
        "restore": "restore",
        "wait_for_save": "store",
        "build_connector_worker_meta": "report",
    }[method]


@pytest.fixture
def started(monkeypatch, model):
    """A scheduler and a worker of V2 on it, with the plugin's real halves."""

    def start(*, drafts, blocks=100):
        run = Run(model, blocks=blocks, plugin=POOL, budget=64)
        runner = RunnerV2(run, drafts=drafts)
        layers = {f"state.{group}": kinds for group, kinds in enumerate(runner.tensors)}
        monkeypatch.setattr(seams, "state_tensors", lambda _, names: [layers[n] for n in names])
        config = run.scheduler.kv_cache_config
        ours = StateCacheConnector(run.config, KVConnectorRole.WORKER, config)
        for method in ("restore", "wait_for_save", "build_connector_worker_meta"):
            noted(monkeypatch, runner.log, ours, method)
        monkeypatch.setattr(v2, "get_kv_transfer_group", lambda: ours)
        monkeypatch.setattr(seams, "transfer_group", lambda: ours)
        monkeypatch.setattr(seams, "worker_base", lambda **_: RunnerV2)
        worker._worker.cache_clear()
        run.connector_v2 = v2.ActiveKVConnector(run.config, {})
        execute = worker._worker("CheckpointWorker").execute_model

        def step():
            planned = run.schedule()
            run.report(planned, execute(runner, planned) or v2.KVConnectorOutput())
            return planned

        run.step = step
        return run, runner

    yield start
    worker._worker.cache_clear()


def noted(monkeypatch, log, ours, method):
    original, name = getattr(ours, method), names_of(method)

    def call(*args):
        if name != "restore" or args[0].restores:
            log.append(name)
        return original(*args)

    monkeypatch.setattr(ours, method, call)


# Before vLLM 0.33 its V2 reports after the store, drafts or not.
DEFERS = hasattr(v2.ActiveKVConnector, "finalize_step")
every_order = pytest.mark.parametrize("drafts", [False, True] if DEFERS else [False])


@every_order
def test_a_step_restores_first_and_stores_last(started, drafts):
    """A prompt of 40 tokens, two blocks and a half: one step each time."""
    run, runner = started(drafts=drafts)
    prompt = words(random.Random(0), 40)
    assert run.ask(prompt) == 0
    run.step()  # nothing to compute: what was stored is reported at the latest here
    without_states(run)
    runner.log.clear()
    assert run.ask(prompt) == 32
    around = ["report", "draft", "store"] if drafts else ["store", "report"]
    assert runner.log == ["restore", "blocks", "forward", *around]
    assert len(run.restores) == 1


@every_order
def test_every_request_goes_on_from_its_own_state(started, drafts):
    """Under pressure, with preemptions, aborts and evictions: `compute` looks at each state."""
    run, runner = started(drafts=drafts, blocks=70)
    for at, _ in enumerate(traffic(run, 2, 300)):
        run.check()
        if at % 50 == 49:
            without_states(run)
    run.step()
    run.step()
    checkpoints = run.scheduler_side.checkpoints
    assert checkpoints.counts.stored > 50
    assert checkpoints.counts.restored > 5
    assert "restore" in runner.log
    assert checkpoints.pinned == 0
    assert run.scheduler_side.faults.anomalies == 0
    checkpoints.check()
