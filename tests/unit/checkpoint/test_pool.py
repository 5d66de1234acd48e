"""The checkpoint pool: what it keeps, what it refuses, how many bytes it takes."""

import pytest
import torch

from statecache.checkpoint.formats import FORMATS
from statecache.checkpoint.ops import native_ops, plain_ops
from statecache.checkpoint.pool import (
    ActiveState,
    CheckpointPool,
    PoolDoesNotFitError,
    SideState,
    estimate_bytes,
)
from support.checkpoint_cases import DTYPES, check_a_pool, is_close, same_bits
from support.pool_states import (
    S,
    everywhere,
    exact_rows,
    lifecycle_pool,
    make_active,
    zeros_like,
)

__all__ = ["everywhere"]  # a fixture


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("mode", FORMATS)
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_state_comes_back(dtype, apart, mode):
    active = make_active(dtype, apart=apart)
    pool = CheckpointPool(active, 4, mode=mode)
    slots = pool.alloc(2)
    assert pool.store(active, [3, 1], slots).refused() == ()
    back = zeros_like(active)
    pool.load(slots, back, [0, 5])
    for source, target in ((3, 0), (1, 5)):
        assert all(map(same_bits, exact_rows(back, target), exact_rows(active, source)))
        for got, expected in zip(back.temporals(), active.temporals(), strict=True):
            got, expected = got[..., target, :, :, :], expected[..., source, :, :, :]
            if mode == "native":
                assert same_bits(got, expected)
            else:
                assert is_close(got, expected)
    untouched = [t[..., [1, 2, 3, 4], :, :, :] for t in back.temporals()]
    assert all((t == 0).all() for t in untouched)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", FORMATS)
def test_a_pool_on_the_cpu(mode, dtype):
    check_a_pool("cpu", mode, dtype)


@pytest.mark.parametrize("mode", FORMATS)
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("reserve", [False, True])
@pytest.mark.parametrize("memory", ["device", "host"])
def test_the_estimate_is_what_is_allocated(mode, apart, reserve, memory):
    active = make_active(apart=apart)
    settings = {"mode": mode, "reserve_slot_zero": reserve, "memory": memory}
    pool = CheckpointPool(active, 5, ring=2, **settings)
    estimate = estimate_bytes(active, 5, **settings)
    assert estimate == pool.total_bytes == (5 + reserve) * pool.bytes_per_state
    assert pool.ring_bytes == (2 * pool.bytes_per_state if memory == "host" else 0)


def test_parts_in_host_memory_are_aligned_to_16_bytes():
    """2 layers of a head of 8 x 8: 128 bytes of int8 and 64 of scales; rows of 7 and of 1 byte."""
    temporal = torch.zeros(2, 3, 1, 8, 8)
    sides = {
        "seven": SideState(torch.zeros(3, 7, dtype=torch.uint8), 0),
        "one": SideState(torch.zeros(3, 1, dtype=torch.uint8), 0),
    }
    active = ActiveState(temporal, [], sides)
    assert estimate_bytes(active, 1) == 128 + 64 + 7 + 1
    assert estimate_bytes(active, 1, memory="host") == 128 + 64 + 16 + 16


def test_slots_in_host_memory_are_named_on_the_host():
    active = make_active()
    pool = CheckpointPool(active, 2, memory="host")
    pool.store(active, [1], pool.alloc(1))
    with pytest.raises(ValueError, match="those of a list, not of a tensor"):
        pool.load(torch.tensor([0]), active, [2])


def test_bytes_by_hand_and_without_memory():
    # Qwen3-Next: 36 layers of 32 heads of 128 x 128, and 8192 x 3 bfloat16 of convolution.
    temporal = torch.empty(36, 1000, 32, 128, 128, device="meta")
    conv = torch.empty(36, 1000, 8192, 3, dtype=torch.bfloat16, device="meta")
    int8 = 36 * 32 * 128 * 128 + 36 * 32 * 128 * 4 + 36 * 8192 * 3 * 2
    assert estimate_bytes(ActiveState(temporal, [conv]), 1) == int8
    narrow = ActiveState(temporal.bfloat16(), [conv])
    assert estimate_bytes(narrow, 10, reserve_slot_zero=True) == 11 * (int8 - 36 * 32 * 128 * 2)
    native = 36 * 32 * 128 * 128 * 4 + 36 * 8192 * 3 * 2
    assert estimate_bytes(ActiveState(temporal, [conv]), 1, mode="native") == native


@pytest.mark.parametrize(("reserve", "fits"), [(False, 3), (True, 2)])
def test_too_many_slots_are_refused_with_the_numbers(reserve, fits):
    active = make_active()
    slot_bytes = estimate_bytes(active, 1)
    with pytest.raises(PoolDoesNotFitError) as error:
        CheckpointPool(active, 9, free_bytes=3 * slot_bytes + 5, reserve_slot_zero=reserve)
    asked = (9 + reserve) * slot_bytes
    assert str(error.value) == (
        f"9 slots need {asked:,} bytes on cpu, {3 * slot_bytes + 5:,} are free: "
        f"{fits} slots would fit"
    )
    assert (error.value.slots, error.value.needed, error.value.fits) == (9, asked, fits)
    CheckpointPool(active, fits, free_bytes=3 * slot_bytes + 5, reserve_slot_zero=reserve)
    with pytest.raises(PoolDoesNotFitError, match="not even one slot fits"):
        CheckpointPool(active, 1, free_bytes=slot_bytes - 1, reserve_slot_zero=reserve)


def test_the_memory_of_the_machine_is_asked():
    huge = ActiveState(torch.zeros(1, 1, 1, 8, 8).expand(1, 1, 1 << 20, 8, 8))
    with pytest.raises(PoolDoesNotFitError, match="on cpu"):
        CheckpointPool(huge, 10**9)


def test_the_reserved_slot_is_never_given():
    pool = CheckpointPool(make_active(), 3, reserve_slot_zero=True)
    assert (pool.slots, pool.available) == (3, 3)
    assert pool.alloc(3) == [1, 2, 3]
    assert pool.alloc(1) is None
    with pytest.raises(ValueError, match="no such slot"):
        pool.free([0])
    pool.free([2])
    assert pool.alloc(1) == [2]
    pool.clear()
    assert pool.alloc(2) == [1, 2]


WRONG_CALLS = [
    (lambda p, _: p.free([2]), "free slot 2: it is not allocated"),
    (lambda p, _: p.free([0, 0]), "free slot 0 twice"),
    (lambda p, _: p.free([0, 4]), "free slot 4: this pool has no such slot"),
    (lambda p, _: p.free([-1]), "free slot -1: this pool has no such slot"),
    (lambda p, a: p.load([1], a, [0]), "load slot 1: no state is stored"),
    (lambda p, a: p.load([0, 3], a, [0, 1]), "load slot 3: it is not allocated"),
    (lambda p, a: p.load([0, 0], a, [2, 2]), "load into active slot 2 twice"),
    (lambda p, a: p.load([0], a, [0, 1]), "2 active slots for 1 slots"),
    (lambda p, a: p.load([0], a, [6]), "active slot 6 is not below 6"),
    (lambda p, a: p.store(a, [1], [3]), "store into slot 3: it is not allocated"),
    (lambda p, a: p.store(a, [1, 2], [1, 1]), "store into slot 1 twice"),
    (lambda p, a: p.store(a, [6], [1]), "active slot 6 is not below 6"),
    (lambda p, _: p.store(make_active(torch.float32), [0], [1]), "the pool was made for"),
    (lambda p, a: p.store(ActiveState(a.temporal), [0], [1]), "the pool was made for"),
    (lambda p, _: p.alloc(-1), "cannot allocate -1"),
    (lambda p, a: p.store(a, torch.tensor([0.0]), [1]), "need a vector of integers"),
    (lambda p, a: p.store(a, torch.tensor([True]), [1]), "need a vector of integers"),
    (lambda p, a: p.store(a, torch.tensor([[0]]), [1]), "need a vector of integers"),
    (lambda p, a: p.store(a, torch.tensor(0), [1]), "need a vector of integers"),
    (lambda p, a: p.load([0], a, torch.tensor([2.0])), "need a vector of integers"),
    (lambda p, a: p.store(a, [0.0], [1]), "cannot be interpreted as an integer"),
    (lambda p, a: p.store(a, [0], [1.0]), "cannot be interpreted as an integer"),
    (lambda p, a: p.load([0.0], a, [2]), "cannot be interpreted as an integer"),
]


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize(("call", "reason"), WRONG_CALLS)
def test_a_wrong_call_raises_and_changes_nothing(call, reason):
    active, pool = lifecycle_pool()
    before = zeros_like(active)
    pool.load([0], before, [4])
    kept = active.temporals()[0].clone()
    with pytest.raises((ValueError, TypeError), match=reason):
        call(pool, active)
    assert pool.available == 2
    assert same_bits(active.temporals()[0], kept)
    after = zeros_like(active)
    pool.load([0], after, [4])
    assert same_bits(after.temporals()[0], before.temporals()[0])
    assert pool.alloc(2) == [2, 3]


@pytest.mark.usefixtures("everywhere")
def test_a_freed_slot_forgets_its_state():
    active, pool = lifecycle_pool()
    pool.free([0])
    assert pool.alloc(1) == [0]
    with pytest.raises(ValueError, match="no state is stored"):
        pool.load([0], active, [0])


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("copies", [None, plain_ops()])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_state_that_is_not_finite_is_not_kept(bad, copies):
    active = make_active()
    active.temporals()[0][2, 1, 1, 15, 23] = bad
    pool = CheckpointPool(active, 3, copies=copies)
    slots = pool.alloc(3)
    report = pool.store(active, [0, 1, 2], slots)
    assert report.refused() == (slots[1],)
    assert report.refused() == (slots[1],)
    assert pool.available == 1
    for call in (
        lambda: pool.load([slots[1]], active, [5]),
        lambda: pool.free([slots[1]]),
        lambda: pool.store(active, [0], [slots[1]]),
    ):
        with pytest.raises(ValueError, match="its store was refused and the slot was freed"):
            call()
    pool.load([slots[0], slots[2]], active, [5, 4])
    assert pool.alloc(1) == [slots[1]]
    with pytest.raises(ValueError, match="no state is stored"):
        pool.load([slots[1]], active, [5])


@pytest.mark.usefixtures("everywhere")
def test_a_load_reads_a_report_that_nobody_read():
    active = make_active()
    active.temporals()[0][0, 1] = float("nan")
    pool = CheckpointPool(active, 2)
    slots = pool.alloc(2)
    report = pool.store(active, [1, 0], slots)
    with pytest.raises(ValueError, match="its store was refused"):
        pool.load(slots, active, [4, 5])
    assert report.refused() == (slots[0],)
    pool.clear()
    with pytest.raises(ValueError, match="not allocated"):
        pool.load(slots, active, [4, 5])


@pytest.mark.usefixtures("everywhere")
def test_a_late_report_leaves_later_uses_of_a_slot_alone():
    active = make_active()
    active.temporals()[0][0, 1] = float("nan")
    pool = CheckpointPool(active, 1)
    (slot,) = pool.alloc(1)
    late = pool.store(active, [1], [slot])
    pool.free([slot])
    assert pool.alloc(1) == [slot]
    pool.store(active, [0], [slot])
    assert late.refused() == ()
    pool.load([slot], active, [5])


@pytest.mark.parametrize("used", ["not", "freed", "stored again"])
def test_a_pool_that_keeps_refused_slots_leaves_them_to_whom_they_were_handed(used):
    """Slot 0 of 2 is refused: it is free once it is freed, and holds what is stored in it then."""
    active = make_active()
    active.temporal[0, 1] = float("nan")
    pool = CheckpointPool(active, 2, keeps_refused=True)
    slots = pool.alloc(2)
    report = pool.store(active, torch.tensor([1, 2]), slots)
    if used == "stored again":
        pool.store(active, [3], slots[:1])
    assert report.refused() == (() if used == "stored again" else (0,))
    assert pool.available == 0
    if used == "stored again":
        pool.load(slots, active, [4, 5])
        return
    with pytest.raises(ValueError, match="load slot 0: no state is stored in it"):
        pool.load(slots, active, [4, 5])
    if used == "freed":
        pool.free(slots[:1])
        assert pool.available == 1
        assert pool.alloc(1) == [0]


@pytest.mark.parametrize("copies", [native_ops(), plain_ops()])
@pytest.mark.parametrize("mode", FORMATS)
def test_slots_of_a_load_can_be_a_tensor(mode, copies):
    active = make_active()
    pool = CheckpointPool(active, 3, mode=mode, copies=copies)
    slots = pool.alloc(3)
    pool.store(active, [0, 1, 2], slots)
    back = zeros_like(active)
    pool.load(torch.tensor([slots[2], -1, 3, slots[0]], dtype=torch.int32), back, [5, 4, 3, 2])
    assert all((each[..., [0, 1, 3, 4], :, :, :] == 0).all() for each in back.temporals())
    for source, target in ((2, 5), (0, 2)):
        assert all(map(same_bits, exact_rows(back, target), exact_rows(active, source)))
        assert is_close(back.temporal[:, target], active.temporal[:, source])
    back = zeros_like(active)
    pool.load(torch.tensor(slots), back, torch.tensor([3, 4, 5]))
    assert all(map(same_bits, exact_rows(back, 4), exact_rows(active, 1)))
    with pytest.raises(ValueError, match="need a vector of integers"):
        pool.load(torch.tensor([0.5]), back, [0])


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("mode", FORMATS)
def test_negative_entries_are_skipped(mode):
    active = make_active()
    pool = CheckpointPool(active, 3, mode=mode)
    slots = pool.alloc(3)
    assert pool.store(active, [0, -1, 2], [slots[0], slots[1], -1]).refused() == ()
    back = zeros_like(active)
    pool.load([slots[0], -1, slots[0]], back, [3, 4, -1])
    assert (back.temporals()[0][:, [0, 1, 2, 4, 5]] == 0).all()
    assert all(map(same_bits, exact_rows(back, 3), exact_rows(active, 0)))
    with pytest.raises(ValueError, match="no state is stored"):
        pool.load([slots[1]], back, [0])


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("mode", FORMATS)
@pytest.mark.parametrize("copies", [native_ops(), plain_ops()])
@pytest.mark.parametrize("skipped", [-1, S, 99])
@pytest.mark.parametrize("read", [False, True])
def test_what_a_tensor_skips_is_left_as_it_is(mode, copies, skipped, read):
    active = make_active()
    pool = CheckpointPool(active, 3, mode=mode, copies=copies)
    kept, empty, written = slots = pool.alloc(3)
    first = pool.store(active, torch.tensor([1]), [kept])
    if read:
        assert first.refused() == ()
    report = pool.store(active, torch.tensor([skipped, skipped, 2], dtype=torch.int32), slots)
    if read:
        assert report.refused() == ()
    assert pool.available == 0
    with pytest.raises(ValueError, match=f"load slot {empty}: no state is stored"):
        pool.load([empty], active, [0])
    assert report.refused() == first.refused() == ()
    back = zeros_like(active)
    pool.load([kept, written], back, torch.tensor([3, 4]))
    for source, target in ((1, 3), (2, 4)):
        assert all(map(same_bits, exact_rows(back, target), exact_rows(active, source)))
        assert is_close(back.temporal[:, target], active.temporal[:, source])
    pool.load([kept, written], back, torch.tensor([skipped, 5]))
    assert all(map(same_bits, exact_rows(back, 5), exact_rows(active, 2)))
    pool.free(slots)


@pytest.mark.usefixtures("everywhere")
def test_a_refused_state_below_a_skipped_store_is_not_kept():
    active = make_active()
    active.temporal[0, 1] = float("nan")
    pool = CheckpointPool(active, 1)
    (slot,) = pool.alloc(1)
    first = pool.store(active, [1], [slot])
    with pytest.raises(ValueError, match="store into slot 0: its store was refused"):
        pool.store(active, torch.tensor([-1]), [slot])
    assert first.refused() == (slot,)
    assert pool.available == 1
