"""The worker's half without an engine: which state goes where and when, and the memory left."""

import types

import pytest
import torch
from scheduled import GROUPS, _groups

from statecache.engine.settings import Settings
from statecache_vllm import seams
from statecache_vllm import worker_side as worker
from statecache_vllm.connector import Stored

BLOCKS = 8


def given(**more):
    return {"kv_cache_plugin": "statecache", "checkpoints": "native", **more}


class FakeBase:
    """What a worker of either model runner has that the plugin asks for."""

    def __init__(self, log):
        self.log = log
        extra = {"statecache": given(checkpoint_slots=2)}
        transfer = types.SimpleNamespace(kv_connector_extra_config=extra)
        self.vllm_config = types.SimpleNamespace(kv_transfer_config=transfer)
        specs = {name: group.kv_cache_spec for group in _groups(16) for name in group.layer_names}
        self.model_runner = types.SimpleNamespace(get_kv_cache_spec=lambda: specs)

    def determine_available_memory(self):
        return 1_000_000

    def execute_model(self, scheduler_output):
        self.log.append("forward")
        return scheduler_output


@pytest.fixture(params=["CpuCheckpointWorker", "CheckpointWorker"])
def fake(monkeypatch, request):
    log = []
    monkeypatch.setattr(seams, "worker_base", lambda **_: FakeBase)
    group = types.SimpleNamespace(restore=log.append)
    monkeypatch.setattr(seams, "transfer_group", lambda: group)
    worker._worker.cache_clear()
    yield getattr(worker, request.param)(log)
    worker._worker.cache_clear()


def test_the_memory_of_the_pool_is_not_there_for_blocks(fake):
    """Two states of 205,824 bytes (test_memory.py)."""
    assert fake.determine_available_memory() == 1_000_000 - 2 * 205_824


def test_restores_run_before_the_forward(fake):
    step = types.SimpleNamespace(kv_connector_metadata="restores")
    assert fake.execute_model(step) is step
    fake.execute_model(types.SimpleNamespace(kv_connector_metadata=None))
    assert fake.log == ["restores", "forward", "forward"]


def test_what_one_of_several_workers_refused_or_failed_counts():
    some, others = Stored((1, 2, 3), (1,)), Stored((1, 2, 3), (3,), failed=True)
    for both in (some.aggregate(others), others.aggregate(some)):
        assert (both.states, set(both.refused), both.failed) == ((1, 2, 3), {1, 3}, True)
    assert not some.aggregate(some).failed


def store_over(monkeypatch, *, shared, **more):
    """A store of four states, and the tensors of each group, all of them the same if `shared`."""

    def layer():
        return [torch.randn(BLOCKS, 3, 512).bfloat16(), torch.randn(BLOCKS, 4, 64, 64)]

    same = layer()
    tensors = {f"state.{group}": same if shared else layer() for group in range(GROUPS)}
    monkeypatch.setattr(seams, "state_tensors", lambda _, names: [tensors[n] for n in names])
    settings = Settings.from_given(given(**more), {})
    config = types.SimpleNamespace(cache_config=types.SimpleNamespace(num_gpu_blocks_override=None))
    kv = types.SimpleNamespace(kv_cache_groups=_groups(16), num_blocks=BLOCKS)
    return worker.CheckpointStore(settings, config, kv), list(tensors.values())


@pytest.mark.parametrize("shared", [False, True])
def test_each_group_of_a_state_comes_back_into_its_own_block(monkeypatch, shared):
    store, tensors = store_over(monkeypatch, shared=shared, checkpoint_slots=4)
    before = [[kind.clone() for kind in group] for group in tensors]
    store.store([(10, 3, (1, 2, 3)), (11, 0, (4, 5, 6))])
    assert store.report() == ((10, 11), ())
    assert store.report() is None
    for group in tensors:
        for kind in group:
            kind.zero_()
    store.restore([(11, 0, (7, 1, 2)), (10, 3, (4, 3, 5))])
    for group, (was, now) in enumerate(zip(before, tensors, strict=True)):
        for kind, kind_now in zip(was, now, strict=True):
            assert torch.equal(kind_now[(7, 1, 2)[group]], kind[(4, 5, 6)[group]])
            assert torch.equal(kind_now[(4, 3, 5)[group]], kind[(1, 2, 3)[group]])


@pytest.mark.parametrize("shared", [False, True])
def test_a_state_that_is_refused_is_told_and_its_slot_serves_the_next_one(monkeypatch, shared):
    """A NaN in one group is enough."""
    more = {"checkpoints": "int8", "checkpoint_slots": 4}
    store, tensors = store_over(monkeypatch, shared=shared, **more)
    tensors[1][1][2, 0, 0, 0] = float("nan")
    for _ in range(2):
        store.store([(10, 3, (1, 2, 3)), (11, 0, (4, 5, 6))])
        assert store.report() == ((10, 11), (10,))
    store.store([(12, 3, (4, 5, 6))])
    assert store.report() == ((12,), ())
    store.restore([(12, 3, (1, 7, 3))])
    for at, (group, came_from) in zip((1, 7, 3), enumerate((4, 5, 6)), strict=True):
        assert torch.allclose(tensors[group][1][at], tensors[group][1][came_from], atol=0.05)
