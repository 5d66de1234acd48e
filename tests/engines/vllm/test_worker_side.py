"""The worker's half without an engine: its memory, the order of a step, and what it reports."""

import pickle
import types

import pytest
from scheduled import _groups
from stored import copy, given
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from statecache_vllm import seams
from statecache_vllm import worker_side as worker
from statecache_vllm.connector import StateCacheConnector, StepCommands, Stored
from statecache_vllm.proof import StepProof, Unproved


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


class FakeStore:
    """Stores states; the report, of the steps before, refuses those that are odd."""

    def __init__(self):
        self.stored, self.due = [], ()

    def begin_step(self):
        self.due, self.stored = tuple(self.stored), []

    def restore(self, copies):
        assert not copies

    def store(self, copies):
        self.stored += [copy.state for copy in copies]

    def take_proof(self):
        return None

    def report(self):
        refused = tuple(state for state in self.due if state % 2)
        return worker.StoreReport(self.due, refused) if self.due else None


@pytest.fixture
def connector():
    """The connector of a worker over a `FakeStore`."""
    extra = types.SimpleNamespace(kv_connector_extra_config={"statecache": given()})
    config = types.SimpleNamespace(kv_transfer_config=extra)
    made = StateCacheConnector(config, KVConnectorRole.WORKER, None)
    made.worker_side.store = FakeStore()
    return made


def stepped(connector, states, order):
    """A step that stores these states: what was reported, as it is once the step is over."""
    commands = StepCommands([], [copy(state, state, (1, 2, 3)) for state in states])
    connector.restore(commands)
    connector.bind_connector_metadata(commands)
    found = {}
    for name in order:
        found[name] = getattr(connector, name)()
    connector.clear_connector_metadata()
    return found["build_connector_worker_meta"]


SAVED_FIRST = ("wait_for_save", "build_connector_worker_meta")


@pytest.mark.parametrize("order", [SAVED_FIRST, SAVED_FIRST[::-1]])
def test_what_a_step_stores_is_told_in_the_next_one(connector, order):
    """With a drafter vLLM stores when it has drafted; by then the report of the step is made."""
    assert stepped(connector, (1, 2), order) is None
    assert stepped(connector, (3, 4), order) == Stored((1, 2), (1,))
    assert stepped(connector, (), order) == Stored((3, 4), (3,))
    assert stepped(connector, (), order) is None


def test_a_state_is_there_once_every_worker_has_said_so():
    """Their devices are not equally far. Who has told everything says nothing."""
    first, second = Stored((1, 2), (), ()), Stored((1,), (1,), (2,))
    for both in (first.aggregate(second), second.aggregate(first)):
        assert both == Stored((1,), (1,), (2,))
    third = Stored((), (), (1, 2))
    for all_three in (first.aggregate(second).aggregate(third), third.aggregate(second)):
        assert (all_three.states, set(all_three.waiting)) == ((), {1, 2})
    assert Stored((2,), (), (3,)).aggregate(Stored((), (), (3,))) == Stored((2,), (), (3,))


@pytest.mark.parametrize(
    "proof", [StepProof(), StepProof((Unproved(4, "bytes"),), 1, 2, {"gdn": [0.1]})]
)
def test_what_a_worker_reports_reaches_another_process(proof):
    stored = Stored((1,), (2,), proof=proof)
    assert pickle.loads(pickle.dumps(stored)) == stored


def test_what_one_of_several_workers_found_counts():
    """They look at the same states, each at its own shard."""
    first = Stored((1,), (), proof=StepProof((), 1, 2, {"gdn": [0.1]}))
    second = Stored((1,), (), proof=StepProof((Unproved(4, "bytes"),), 1, 2, {"gdn": [0.2]}))
    both = StepProof((Unproved(4, "bytes"),), 1, 2, {"gdn": [0.1, 0.2]})
    assert first.aggregate(second).proof == both
    assert second.aggregate(first).proof.unproved == both.unproved
    assert second.aggregate(second).proof.unproved == both.unproved
