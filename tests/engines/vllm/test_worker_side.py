"""The worker's half without an engine: which state goes where and when, and the memory left."""

import dataclasses
import pickle
import types
from hashlib import blake2b
from importlib import import_module

import pytest
import torch
from scheduled import GROUPS, _groups
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheGroupSpec

from statecache.checkpoint.proof import Prefix
from statecache.checkpoint.selftest import CopiesDoNotWorkError
from statecache.engine.settings import Settings
from statecache_vllm import seams
from statecache_vllm import worker_side as worker
from statecache_vllm.checkpoints import CheckpointCopy
from statecache_vllm.connector import StateCacheConnector, StepCommands, Stored
from statecache_vllm.hand_over import new_barrier
from statecache_vllm.proof import ProofKeeper, StepProof, Unproved
from support.launch_failures import LAUNCH_ERRORS, failing, launch_error
from support.operators import Operators, count_uploads

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


class FakeStore:
    """Stores states; the report refuses those that are odd."""

    def __init__(self):
        self.stored = []

    def restore(self, copies):
        assert not copies

    def store(self, copies):
        self.stored += [copy.state for copy in copies]

    def take_proof(self):
        return None

    def report(self):
        states, self.stored = tuple(self.stored), []
        return (states, tuple(state for state in states if state % 2)) if states else None


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


def test_a_report_that_is_asked_for_before_the_store_has_the_states_of_its_step(connector):
    """With a drafter vLLM stores when it has drafted; by then the report is made."""
    late = SAVED_FIRST[::-1]
    first = stepped(connector, (1, 2), late)
    assert (first.states, first.refused) == ((1, 2), (1,))
    again = stepped(connector, (), late)
    assert (again.states, again.refused) == ((1, 2), (1,))
    assert stepped(connector, (), late) is None
    assert stepped(connector, (3, 4), SAVED_FIRST).states == (3, 4)
    assert stepped(connector, (), SAVED_FIRST) is None


def test_a_report_that_was_sent_before_the_store_is_made_good_by_the_next(connector):
    """As where it goes to another process at once."""
    commands = StepCommands([], [copy(2, 0, (1, 2, 3))])
    connector.restore(commands)
    connector.bind_connector_metadata(commands)
    sent = pickle.loads(pickle.dumps(connector.build_connector_worker_meta()))
    connector.wait_for_save()
    assert sent.states == ()
    assert stepped(connector, (4,), SAVED_FIRST).states == (4, 2)


def copy(state, slot, blocks, **prefix):
    """A copy of a state whose prefix is its number, 64 tokens long, unless another is given."""
    return CheckpointCopy(state, slot, blocks, Prefix(**{"key": state, "depth": 64, **prefix}))


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
    store.store([copy(10, 3, (1, 2, 3)), copy(11, 0, (4, 5, 6))])
    assert store.report() == ((10, 11), ())
    assert store.report() is None
    for group in tensors:
        for kind in group:
            kind.zero_()
    store.restore([copy(11, 0, (7, 1, 2)), copy(10, 3, (4, 3, 5))])
    assert store.take_proof() is None
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
        store.store([copy(10, 3, (1, 2, 3)), copy(11, 0, (4, 5, 6))])
        assert store.report() == ((10, 11), (10,))
    store.store([copy(12, 3, (4, 5, 6))])
    assert store.report() == ((12,), ())
    store.restore([copy(12, 3, (1, 7, 3))])
    for at, (group, came_from) in zip((1, 7, 3), enumerate((4, 5, 6)), strict=True):
        assert torch.allclose(tensors[group][1][at], tensors[group][1][came_from], atol=0.05)


WRONG = {"prefix": {"key": 99}, "depth": {"depth": 32}, "empty": {}}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("mode", ["native", "int8"])
@pytest.mark.parametrize("verify", [0, 1])
def test_what_does_not_fit_its_slot_is_not_restored(monkeypatch, what, mode, verify):
    """The other restore of the step is carried out."""
    more = {"checkpoints": mode, "checkpoint_slots": 4, "verify": verify}
    store, tensors = store_over(monkeypatch, shared=False, **more)
    store.store([copy(10, 3, (1, 2, 3)), copy(11, 0, (4, 5, 6))])
    store.report()
    store.take_proof()
    before = [[kind.clone() for kind in group] for group in tensors]
    slot = 1 if what == "empty" else 3
    store.restore([copy(10, slot, (7, 7, 7), **WRONG[what]), copy(11, 0, (1, 2, 3))])
    assert store.take_proof() == StepProof((Unproved(10, what),), restores=verify)
    assert store.take_proof() is None
    for group, (was, now) in enumerate(zip(before, tensors, strict=True)):
        for kind, kind_now in zip(was, now, strict=True):
            assert torch.equal(kind_now[7], kind[7])
            came_from = kind[(4, 5, 6)[group]]
            near = 0 if mode == "native" or kind.ndim == 3 else 0.05
            assert torch.allclose(kind_now[(1, 2, 3)[group]], came_from, rtol=0, atol=near)


@pytest.mark.parametrize("mode", ["native", "int8"])
@pytest.mark.parametrize("rate", [0, 0.01, 1])
def test_what_a_closer_look_does_for_each_state(monkeypatch, mode, rate):
    """300 states, stored and restored: two sums and, of int8, one look at the error, for its share.

    The copies are the same at any rate.
    """
    from statecache.checkpoint.pool import CheckpointPool

    done = dict.fromkeys(("store", "load", "checksums", "relative_errors"), 0)

    def counted(name, original):
        def call(*args, **more):
            done[name] += 1
            return original(*args, **more)

        return call

    for name in done:
        monkeypatch.setattr(CheckpointPool, name, counted(name, getattr(CheckpointPool, name)))
    more = {"checkpoints": mode, "checkpoint_slots": 4, "verify": rate}
    store, _ = store_over(monkeypatch, shared=True, **more)
    done.update(dict.fromkeys(done, 0))  # a pool proves its copies when it is made
    keys = [
        int.from_bytes(blake2b(bytes([n % 256, n // 256]), digest_size=8).digest(), "little")
        for n in range(300)
    ]
    looked = 0
    for number, key in enumerate(keys):
        store.store([copy(number, number % 4, (1, 2, 3), key=key)])
        store.restore([copy(number, number % 4, (4, 5, 6), key=key)])
        store.report()
        proof = store.take_proof()
        looked += 0 if proof is None else proof.stores + proof.restores
    picked = sum(key < rate * 2**64 for key in keys)
    assert (rate == 0) == (picked == 0)
    assert looked == 2 * picked
    errors = picked * GROUPS if mode == "int8" else 0
    assert done == {
        "store": 300,
        "load": 300,
        "checksums": 2 * picked,
        "relative_errors": errors,
    }


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("mode", ["native", "int8"])
def test_a_flipped_bit_in_any_group_and_tensor_is_in_the_report(monkeypatch, shared, mode):
    more = {"checkpoints": mode, "checkpoint_slots": 4, "verify": 1}
    store, _ = store_over(monkeypatch, shared=shared, **more)
    store.store([copy(10, 3, (1, 2, 3)), copy(11, 0, (4, 5, 6))])
    assert store.report() == ((10, 11), ())
    proof = store.take_proof()
    assert (proof.unproved, proof.stores, proof.restores) == ((), 2, 0)
    flipped = 0
    for pool in store._pools:
        width = len(pool.groups)
        for at in range(width):
            for row in pool.pool._rows(3 * width + at):
                data = row[-1].view(torch.uint8).reshape(-1)
                data[-1] ^= 4
                store.restore([copy(11, 0, (7, 1, 2)), copy(10, 3, (4, 3, 5))])
                assert store.take_proof() == StepProof((Unproved(10, "bytes"),), 0, 2, {})
                data[-1] ^= 4
                flipped += 1
    assert flipped == GROUPS * {"native": 2, "int8": 3}[mode]
    store.restore([copy(10, 3, (4, 3, 5))])
    assert store.take_proof() == StepProof((), 0, 1, {})


@pytest.mark.parametrize("layers", [12, 23, 36])
@pytest.mark.parametrize(
    ("mode", "kinds"),
    [("int8", (["move", "load"], ["move", "store"])), ("native", (["move"],) * 2)],
)
def test_a_step_is_one_launch_a_kind_whatever_the_layers(monkeypatch, layers, mode, kinds):
    """The groups lie over each other. One upload a copy, each with the flags of a store."""
    same = [[torch.zeros(BLOCKS, 3, 4), torch.zeros(BLOCKS, 2, 8, 8)] for _ in range(layers)]
    spec = _groups(16)[0].kv_cache_spec
    spec = dataclasses.replace(spec, shapes=((3, 4), (2, 8, 8)), dtypes=(torch.float32,) * 2)
    names = [[f"{group}.{layer}" for layer in range(layers)] for group in range(GROUPS)]
    groups = [KVCacheGroupSpec(each, spec) for each in names]
    monkeypatch.setattr(seams, "state_tensors", lambda *_: same)
    settings = Settings.from_given(given(checkpoints=mode, checkpoint_slots=4), {})
    cache = types.SimpleNamespace(num_gpu_blocks_override=None)
    config = types.SimpleNamespace(cache_config=cache)
    kv = types.SimpleNamespace(kv_cache_groups=groups, num_blocks=BLOCKS)
    store = worker.CheckpointStore(settings, config, kv)
    store.store([copy(10, 3, (1, 2, 3))])
    store.report()
    uploads = count_uploads(monkeypatch, import_module("statecache.checkpoint.pool"))
    for _ in range(2):
        with Operators() as operators:
            store.restore([copy(10, 3, (4, 5, 6))])
        assert operators.seen == kinds[0]
        with Operators() as operators:
            store.store([copy(11, 1, (1, 2, 3)), copy(12, 2, (4, 5, 6))])
        assert operators.seen == kinds[1]
        assert store.report() == ((11, 12), ())
    flags = 2 * GROUPS if mode == "int8" else 0
    assert uploads == [(2, 0), (2, flags)] * 2


@pytest.mark.parametrize("reason", LAUNCH_ERRORS)
def test_a_launch_that_fails_is_made_by_plain_torch_and_told_once(monkeypatch, reason, caplog):
    """In the middle of a restore: both states come back, and those of later steps."""
    more = {"checkpoints": "int8", "checkpoint_slots": 4}
    store, tensors = store_over(monkeypatch, shared=False, **more)
    store.store([copy(10, 3, (1, 2, 3)), copy(11, 0, (4, 5, 6))])
    assert store.report() == ((10, 11), ())
    store._pools[1].pool._launches.ops = failing(launch_error(reason), "load")
    for _ in range(2):
        store.restore([copy(10, 3, (7, 7, 7))])
        for at, group in zip((1, 2, 3), tensors, strict=True):
            assert torch.allclose(group[1][7], group[1][at], atol=0.05)
            group[1][7] = 0
    proof = store.take_proof()
    assert proof == StepProof(launch_failures=1)
    assert store.take_proof() is None
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert reason in line
    assert "\n" not in line
    faults = new_barrier()
    ProofKeeper(faults).note(proof.merged(StepProof()))
    assert (faults.anomalies, faults.active) == (1, True)


def test_a_device_that_copies_nothing_stops_with_one_line(monkeypatch, capsys):
    def fail(*_):
        raise CopiesDoNotWorkError("nothing can be copied on cuda:0: the device is gone")

    monkeypatch.setattr("statecache.checkpoint.pool.working_ops", fail)
    with pytest.raises(SystemExit):
        store_over(monkeypatch, shared=False, checkpoint_slots=4)
    assert capsys.readouterr().err == (
        "statecache: a pool of native checkpoints cannot be made: nothing can be copied on cuda:0:"
        " the device is gone\n"
    )


def test_the_error_of_int8_is_measured_for_each_group(monkeypatch):
    """Of a refused state nothing is told."""
    more = {"checkpoints": "int8", "checkpoint_slots": 4, "verify": 1}
    store, tensors = store_over(monkeypatch, shared=False, **more)
    for group in tensors:
        group[1][4] = 0
        group[1][5] = 0
        group[1][6] = 0
    tensors[2][1][3, 0, 0, 0] = float("inf")
    store.store([copy(10, 3, (1, 2, 3)), copy(11, 0, (4, 5, 6))])
    errors = store.take_proof().errors
    assert list(errors) == ["mamba2"]
    # Two good groups of the refused state, three groups of zeros.
    assert sorted(errors["mamba2"])[:3] == [0.0, 0.0, 0.0]
    assert [0.001 < error < 0.02 for error in sorted(errors["mamba2"])[3:]] == [True, True]
    assert store.report() == ((10, 11), (10,))
    store.restore([copy(10, 3, (7, 7, 7))])
    assert store.take_proof().unproved == (Unproved(10, "empty"),)


def test_at_rate_0_nothing_but_the_copies_is_done(monkeypatch):
    store, _ = store_over(monkeypatch, shared=True, checkpoints="int8", checkpoint_slots=4)
    for pool in store._pools:
        monkeypatch.setattr(pool.pool, "checksums", None)
        monkeypatch.setattr(pool.pool, "relative_errors", None)
    store.store([copy(10, 3, (1, 2, 3))])
    store.report()
    store.restore([copy(10, 3, (4, 5, 6))])
    assert store.take_proof() is None
    assert store.records.rate == 0.0


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
