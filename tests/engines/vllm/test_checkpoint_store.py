"""A worker's store of checkpoints: which state goes where, and what is told of it."""

import dataclasses
import types
from hashlib import blake2b

import pytest
import torch
from scheduled import GROUPS, _groups
from stored import BLOCKS, copy, given, store_over, told
from vllm.v1.kv_cache_interface import KVCacheGroupSpec

from statecache.checkpoint.selftest import CopiesDoNotWorkError
from statecache.engine.settings import Settings
from statecache_vllm import seams
from statecache_vllm import worker_side as worker
from statecache_vllm.hand_over import new_barrier
from statecache_vllm.proof import ProofKeeper, StepProof, Unproved
from support.launch_failures import LAUNCH_ERRORS, failing, launch_error
from support.operators import Operators, count_uploads


@pytest.mark.parametrize("memory", ["device", "host"])
@pytest.mark.parametrize("shared", [False, True])
def test_each_group_of_a_state_comes_back_into_its_own_block(monkeypatch, shared, memory):
    more = {"checkpoint_slots": 4, "checkpoint_memory": memory}
    store, tensors = store_over(monkeypatch, shared=shared, **more)
    before = [[kind.clone() for kind in group] for group in tensors]
    store.store([copy(10, 3, (1, 2, 3)), copy(11, 0, (4, 5, 6))])
    assert told(store) is None  # exact copies are good
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
        assert store.report() is None
        assert told(store) == ((10, 11), (10,))
        assert told(store) is None
    store.store([copy(12, 3, (4, 5, 6))])
    assert told(store) == ((12,), ())
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
    told(store)
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
        told(store)
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
    assert told(store) == (None if mode == "native" else ((10, 11), ()))
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
    told(store)
    uploads = count_uploads(monkeypatch)
    for _ in range(2):
        with Operators() as operators:
            store.restore([copy(10, 3, (4, 5, 6))])
        assert operators.seen == kinds[0]
        with Operators() as operators:
            store.store([copy(11, 1, (1, 2, 3)), copy(12, 2, (4, 5, 6))])
        assert operators.seen == kinds[1]
        assert told(store) == (None if mode == "native" else ((11, 12), ()))
    flags = 2 * GROUPS if mode == "int8" else 0
    assert uploads == [(2, 0), (2, flags)] * 2


@pytest.mark.parametrize("reason", LAUNCH_ERRORS)
def test_a_launch_that_fails_is_made_by_plain_torch_and_told_once(monkeypatch, reason, caplog):
    """In the middle of a restore: both states come back, and those of later steps."""
    more = {"checkpoints": "int8", "checkpoint_slots": 4}
    store, tensors = store_over(monkeypatch, shared=False, **more)
    store.store([copy(10, 3, (1, 2, 3)), copy(11, 0, (4, 5, 6))])
    assert told(store) == ((10, 11), ())
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


@pytest.mark.parametrize("reason", LAUNCH_ERRORS)
def test_a_store_whose_launch_fails_is_made_by_plain_torch_and_told_once(monkeypatch, reason):
    """Nothing is refused for it, and the state comes back."""
    store, tensors = store_over(monkeypatch, shared=True, checkpoints="int8", checkpoint_slots=4)
    (pool,) = store._pools
    pool.pool._launches.ops = failing(launch_error(reason), "store")
    for slot in (3, 0):
        store.store([copy(slot, slot, (1, 2, 3))])
        assert told(store) == ((slot,), ())
    assert store.take_proof() == StepProof(launch_failures=1)
    store.restore([copy(0, 0, (4, 5, 6))])
    for at, came_from in ((4, 1), (5, 2), (6, 3)):
        assert torch.allclose(tensors[0][1][at], tensors[0][1][came_from], atol=0.05)


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
    assert told(store) == ((10, 11), (10,))
    store.restore([copy(10, 3, (7, 7, 7))])
    assert store.take_proof().unproved == (Unproved(10, "empty"),)


def test_at_rate_0_nothing_but_the_copies_is_done(monkeypatch):
    store, _ = store_over(monkeypatch, shared=True, checkpoints="int8", checkpoint_slots=4)
    for pool in store._pools:
        monkeypatch.setattr(pool.pool, "checksums", None)
        monkeypatch.setattr(pool.pool, "relative_errors", None)
    store.store([copy(10, 3, (1, 2, 3))])
    told(store)
    store.restore([copy(10, 3, (4, 5, 6))])
    assert store.take_proof() is None
    assert store.records.rate == 0.0
