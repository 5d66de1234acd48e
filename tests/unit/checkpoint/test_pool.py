"""The checkpoint pool: what it keeps, what it refuses, how many bytes it takes."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from statecache.checkpoint import pool as checkpoint_pool
from statecache.checkpoint.formats import FORMATS
from statecache.checkpoint.ops import native_copies, plain_copies
from statecache.checkpoint.pool import (
    ActiveState,
    CheckpointPool,
    PoolDoesNotFitError,
    SideState,
    estimate_bytes,
)
from support.checkpoint_cases import DTYPES, check_a_pool, is_close, make_state, same_bits

L, S, H, V, K = 3, 6, 2, 16, 24


def make_active(dtype=torch.bfloat16, *, apart=False, seed=0):
    temporal = make_state((L, S, H, V, K), dtype, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    conv = torch.randn(L, S, 10, 3, generator=generator).to(torch.bfloat16)
    side = {
        "layered": SideState(torch.randint(0, 9, (2, S, 5), generator=generator), 1),
        "flat": SideState(torch.randint(0, 255, (S, 3), dtype=torch.uint8), 0),
    }
    if apart:
        return ActiveState(list(temporal.unbind()), list(conv.unbind()), side)
    return ActiveState(temporal, [conv], side)


def zeros_like(active):
    temporal = active.temporal
    if isinstance(temporal, torch.Tensor):
        temporal = torch.zeros_like(temporal)
    else:
        temporal = [torch.zeros_like(layer) for layer in temporal]
    conv = [torch.zeros_like(tensor) for tensor in active.conv]
    side = {n: replace(s, tensor=torch.zeros_like(s.tensor)) for n, s in active.side.items()}
    return ActiveState(temporal, conv, side)


def exact_rows(active, slot):
    return [s.tensor.select(s.slot_dim, slot) for s in active.exact().values()]


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
def test_the_estimate_is_what_is_allocated(mode, apart, reserve):
    active = make_active(apart=apart)
    pool = CheckpointPool(active, 5, mode=mode, reserve_slot_zero=reserve)
    estimate = estimate_bytes(active, 5, mode=mode, reserve_slot_zero=reserve)
    assert estimate == pool.total_bytes == (5 + reserve) * pool.bytes_per_state


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
    one = estimate_bytes(active, 1)
    with pytest.raises(PoolDoesNotFitError) as error:
        CheckpointPool(active, 9, free_bytes=3 * one + 5, reserve_slot_zero=reserve)
    asked = (9 + reserve) * one
    assert str(error.value) == (
        f"9 slots need {asked:,} bytes on cpu, {3 * one + 5:,} are free: {fits} slots would fit"
    )
    assert (error.value.slots, error.value.needed, error.value.fits) == (9, asked, fits)
    CheckpointPool(active, fits, free_bytes=3 * one + 5, reserve_slot_zero=reserve)
    with pytest.raises(PoolDoesNotFitError, match="not even one slot fits"):
        CheckpointPool(active, 1, free_bytes=one - 1, reserve_slot_zero=reserve)


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


def lifecycle_pool():
    """Slot 0 stored, 1 allocated, 2 and 3 free."""
    active = make_active()
    pool = CheckpointPool(active, 4)
    pool.alloc(2)
    assert pool.store(active, [0], [0]).refused() == ()
    return active, pool


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


def test_a_freed_slot_forgets_its_state():
    active, pool = lifecycle_pool()
    pool.free([0])
    assert pool.alloc(1) == [0]
    with pytest.raises(ValueError, match="no state is stored"):
        pool.load([0], active, [0])


@pytest.mark.parametrize("copies", [None, plain_copies()])
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


@pytest.mark.parametrize("mode", FORMATS)
@pytest.mark.parametrize("copies", [native_copies(), plain_copies()])
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


def test_empty_lists():
    active = make_active()
    pool = CheckpointPool(active, 1)
    assert pool.alloc(0) == []
    assert pool.store(active, [], []).refused() == ()
    pool.load([], active, [])
    pool.free([])
    assert pool.available == 1


def test_rows_stored_in_another_order_of_dimensions():
    temporal = make_state((L, S, H, V, K), torch.float32)
    conv = torch.randn(L, S, 3, 10).transpose(2, 3)
    active = ActiveState(temporal, [conv])
    pool = CheckpointPool(active, 1)
    slots = pool.alloc(1)
    pool.store(active, [2], slots)
    back = zeros_like(active)
    pool.load(slots, back, [1])
    assert torch.equal(back.conv[0][:, 1], conv[:, 2])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: ActiveState([]), "needs a temporal tensor"),
        (lambda: ActiveState(torch.zeros(0, 2, 1, 8, 8)), "is empty"),
        (lambda: ActiveState(torch.zeros(1, 2, 0, 8, 8)), "is empty"),
        (lambda: ActiveState([torch.zeros(2, 1, 0, 8)]), "is empty"),
        (lambda: ActiveState(torch.zeros(1, 2, 1, 8, 16)[..., :8]), "matrix has gaps"),
        (lambda: ActiveState(torch.zeros(1, 2, 1, 8, 8).transpose(3, 4)), "matrix has gaps"),
        (
            lambda: ActiveState([torch.zeros(2, 1, 8, 8), torch.zeros(2, 2, 8, 8)[:, :1]]),
            "differ between layers",
        ),
        (
            lambda: ActiveState([torch.zeros(2, 1, 8, 8), torch.zeros(2, 1, 8, 8, device="meta")]),
            "differ between layers",
        ),
        (
            lambda: ActiveState(torch.zeros(1, 2, 1, 8, 8), [torch.zeros(1, 2, 3, 4)[..., :2]]),
            "conv.0: a row with strides",
        ),
        (
            lambda: ActiveState(torch.zeros(1, 2, 1, 8, 8), [torch.zeros(1, 3, 4)]),
            "conv.0: 3 slots, but the temporal state has 2",
        ),
        (
            lambda: ActiveState(
                torch.zeros(1, 2, 1, 8, 8), side={"x": SideState(torch.zeros(1, 4), 0)}
            ),
            "side.x: 1 slots, but the temporal state has 2",
        ),
        (
            lambda: ActiveState(torch.zeros(1, 2, 1, 8, 8), [torch.zeros(1, 2, 4, device="meta")]),
            "conv.0 is on meta, not on cpu",
        ),
        (lambda: ActiveState(torch.zeros(1, 2, 1, 8, 8, dtype=torch.float64)), "need 5 dimensions"),
        (lambda: ActiveState([torch.zeros(1, 2, 1, 8, 8)]), "need 4 dimensions"),
        (lambda: ActiveState([torch.zeros(2, 1, 8, 8), torch.zeros(2, 1, 8, 16)]), "differ"),
        (lambda: ActiveState(torch.zeros(1, 2, 1, 8, 12)), "multiples of 8"),
        (lambda: ActiveState(torch.zeros(1, 2, 1, 8, 8), [torch.zeros(2)]), "conv.0: slots"),
    ],
)
def test_an_active_state_that_cannot_be_kept(make, reason):
    with pytest.raises(ValueError, match=reason):
        CheckpointPool(make(), 1)


def test_bad_modes_and_sizes():
    with pytest.raises(ValueError, match="unknown checkpoint format 'int4': use native or int8"):
        CheckpointPool(make_active(), 1, mode="int4")
    with pytest.raises(ValueError, match="at least 1 slot"):
        CheckpointPool(make_active(), 0)
    for slots in (-1, 0):
        with pytest.raises(ValueError, match="at least 1 slot"):
            estimate_bytes(make_active(), slots)
    for make in (CheckpointPool, estimate_bytes):
        with pytest.raises(TypeError, match="integer"):
            make(make_active(), 1.5)


def test_a_native_pool_needs_heads_without_gaps():
    active = ActiveState(torch.zeros(1, 2, 4, 8, 8)[:, :, ::2])
    CheckpointPool(active, 1)
    with pytest.raises(ValueError, match="a slot's heads has gaps"):
        CheckpointPool(active, 1, mode="native")


def with_gaps(active):
    """The same state, its matrices with gaps between rows."""
    wide = torch.zeros(L, S, H, V, 2 * K, dtype=active.temporal.dtype)
    wide[..., :K] = active.temporal
    return replace(active, temporal=wide[..., :K])


def with_other_slots(active):
    return replace(active, conv=[torch.cat([conv, conv], 1) for conv in active.conv])


def with_rows_transposed(active):
    conv = [t.transpose(2, 3).contiguous().transpose(2, 3) for t in active.conv]
    return replace(active, conv=conv)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_gaps, "has gaps"),
        (with_other_slots, "12 slots, but the temporal state has 6"),
        (with_rows_transposed, "the pool was made for"),
    ],
)
@pytest.mark.parametrize("mode", FORMATS)
@pytest.mark.parametrize("copies", [native_copies(), plain_copies()])
def test_a_layout_that_does_not_fit_is_refused_before_anything_moves(change, reason, mode, copies):
    active = make_active()
    pool = CheckpointPool(active, 2, mode=mode, copies=copies)
    slots = pool.alloc(2)
    pool.store(active, [0, 1], slots)
    other = change(make_active(seed=7))
    with pytest.raises(ValueError, match=reason):
        pool.store(other, [2, 3], slots)
    target = change(zeros_like(active))
    with pytest.raises(ValueError, match=reason):
        pool.load(slots, target, [2, 3])
    assert all((s.tensor == 0).all() for s in target.exact().values())
    back = zeros_like(active)
    pool.load(slots, back, [4, 5])
    for source, to in ((0, 4), (1, 5)):
        assert all(map(same_bits, exact_rows(back, to), exact_rows(active, source)))
        assert is_close(back.temporal[:, to], active.temporal[:, source])


@pytest.mark.parametrize("by_tensor", [False, True])
def test_a_store_that_fails_halfway_leaves_its_slots_empty(by_tensor):
    active = make_active()

    def fail(*_):
        raise RuntimeError("the device is gone")

    plain = plain_copies()
    pool = CheckpointPool(active, 3, copies=replace(plain))
    slots = pool.alloc(3)
    pool.store(active, [0, 1, 2], slots)
    pool._copies = replace(plain, store=fail)
    sources = torch.tensor([3, 4]) if by_tensor else [3, 4]
    with pytest.raises(RuntimeError, match="the device is gone"):
        pool.store(active, sources, slots[:2])
    pool._copies = plain
    for slot in slots[:2]:
        with pytest.raises(ValueError, match="no state is stored in it"):
            pool.load([slot], active, [5])
    pool.load([slots[2]], active, [5])
    pool.free(slots)


def test_dimensions_of_size_one_do_not_matter_to_the_order_of_a_row():
    temporal = make_state((L, S, H, V, K), torch.float32)
    conv = torch.randn(L, S, 1, 7)
    active = ActiveState(temporal, [conv])
    pool = CheckpointPool(active, 1)
    slots = pool.alloc(1)
    pool.store(active, [2], slots)
    odd = torch.zeros(L, S, 7).as_strided((L, S, 1, 7), (S * 7, 7, 1, 1))
    pool.load(slots, ActiveState(temporal, [odd]), [1])
    assert torch.equal(odd[:, 1], conv[:, 2])


class Device:
    """Stands in for the streams of a GPU, and keeps what was asked of it."""

    def __init__(self, monkeypatch, capturing=False):
        self.calls, self.stream = [], "a"
        for name, stand_in in (
            ("is_current_stream_capturing", lambda: capturing),
            ("current_stream", lambda _: Stream(self.stream, self.calls)),
            ("device", lambda _: nullcontext()),
        ):
            monkeypatch.setattr(torch.cuda, name, stand_in)


class Stream:
    def __init__(self, name, calls):
        self.name, self.calls = name, calls

    def __eq__(self, other):
        return self.name == other.name

    def __hash__(self):
        return hash(self.name)

    def wait_event(self, event):
        self.calls.append((self.name, "waits for", event.on))

    def record_event(self):
        self.calls.append((self.name, "records"))
        return Event(self.name, self.calls)


class Event:
    def __init__(self, on, calls):
        self.on, self.calls = on, calls

    def synchronize(self):
        self.calls.append(("host waits for", self.on))


def test_copies_are_ordered_across_streams(monkeypatch):
    active = make_active()
    pool = CheckpointPool(active, 2)
    slots = pool.alloc(2)
    device = Device(monkeypatch)
    pool._order = checkpoint_pool.CopyOrder(torch.device("cuda"))
    report = pool.store(active, [0, 1], slots)
    device.stream = "b"
    assert report.refused() == ()
    pool.load(slots, active, [2, 3])
    pool.store(active, [0], slots[:1])
    device.stream = "a"
    pool.load(slots, active, [2, 3])
    assert device.calls == [
        ("a", "records"),
        ("host waits for", "a"),
        ("b", "waits for", "a"),
        ("b", "records"),
        ("b", "records"),
        ("a", "waits for", "b"),
        ("host waits for", "b"),
        ("a", "records"),
    ]


def test_a_pool_refuses_to_be_captured(monkeypatch):
    active, pool = lifecycle_pool()
    pool._order = checkpoint_pool.CopyOrder(torch.device("cuda"))
    Device(monkeypatch, capturing=True)
    kept = active.temporal.clone()
    for call in (lambda: pool.store(active, [0], [1]), lambda: pool.load([0], active, [1])):
        with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
            call()
    assert same_bits(active.temporal, kept)


def test_the_memory_limit_of_the_control_group_counts(tmp_path):
    for group, limit in (("", "max"), ("outer", "1000"), ("outer/inner", "5000")):
        folder = tmp_path / group
        folder.mkdir(exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text("900\n")
        (folder / "memory.stat").write_text("anon 600\ninactive_file 300\n")
    free = checkpoint_pool._free_in_groups
    assert free(tmp_path, "4:memory:/x\n0::/outer/inner\n") == [4400, 400]
    assert free(tmp_path, "0::/\n") == []
    assert free(tmp_path / "absent", "0::/outer\n") == []
