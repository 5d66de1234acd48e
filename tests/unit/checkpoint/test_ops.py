"""The native copies against the plain torch reference, bit for bit."""

import pytest
import torch

from statecache.checkpoint.ops import NON_FINITE, STORED, native_ops, plain_ops
from support.checkpoint_cases import (
    DTYPES,
    LAYERS,
    SLOTS,
    make_state,
    move,
    pool_tensors,
    same_bits,
    store,
    vector,
)

SHAPES = [
    (1, 64, 64),
    (2, 128, 128),
    (3, 8, 8),
    (1, 24, 40),
    (2, 16, 264),
    (1, 256, 520),
    (4, 64, 128),
]


ACTIVE_SLOTS = [3, -1, 0, 4, 2]


CHECKPOINT_SLOTS = [1, 0, 6, -1, 2]


EXPECTED_REPORT = [STORED, 0, STORED, 0, STORED]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_store_and_load_agree_with_the_reference(shape, dtype):
    active = [make_state((LAYERS, SLOTS, *shape), dtype)]
    results = []
    for copies in (native_ops(), plain_ops()):
        tensors = pool_tensors(LAYERS, 7, *shape, dtype, fill=77)
        assert store(copies, active, tensors, ACTIVE_SLOTS, CHECKPOINT_SLOTS) == EXPECTED_REPORT
        back = [torch.full_like(active[0], 7)]
        copies.load(*tensors, back, torch.tensor(CHECKPOINT_SLOTS), torch.tensor(ACTIVE_SLOTS))
        results.append((*tensors, back[0]))
    for native, plain in zip(*results, strict=True):
        assert same_bits(native, plain)
    assert (results[0][0][:, [0, 3, 4, 5]] == 77).all()  # slots that were not listed, or skipped
    assert (results[0][2][:, [1, 4]] == 7).all()
    assert (results[0][2][:, [3, 0, 2], ..., 0] == 0).all()  # a column of zeros


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_apart_and_gaps_between_heads_slots_and_layers(dtype):
    shape = (2, 64, 64)
    wide = make_state((LAYERS + 1, SLOTS, 4, 64, 64), dtype, seed=1)
    strided = wide[:2, :, ::2]
    apart = [wide[0][:, ::2], wide[1][:, ::2]]
    expected = pool_tensors(LAYERS, 7, *shape, dtype)
    store(plain_ops(), [strided.contiguous()], expected, ACTIVE_SLOTS, CHECKPOINT_SLOTS)
    for active in ([strided], apart):
        got = pool_tensors(LAYERS, 7, *shape, dtype)
        store(native_ops(), active, got, ACTIVE_SLOTS, CHECKPOINT_SLOTS)
        assert all(map(same_bits, got, expected))
    before = wide.clone()
    for active in ([strided], apart):
        wide.zero_()
        native_ops().load(
            *expected, active, torch.tensor(CHECKPOINT_SLOTS), torch.tensor(ACTIVE_SLOTS)
        )
        assert wide[:2, :, 1::2].abs().sum() == 0  # the heads between are not ours
        assert wide[2].abs().sum() == 0
        assert wide[:2, [3, 0, 2], ::2].abs().sum() > 0
    wide.copy_(before)


def test_more_layers_than_one_launch_takes():
    active = [make_state((1, 1, 8, 8), torch.bfloat16, seed=layer) for layer in range(131)]
    got, expected = (pool_tensors(131, 1, 1, 8, 8, torch.bfloat16) for _ in range(2))
    store(native_ops(), active, got, [0], [0])
    store(plain_ops(), active, expected, [0], [0])
    assert all(map(same_bits, got, expected))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_reported(dtype, bad):
    active = torch.ones(LAYERS, SLOTS, 2, 16, 24, dtype=dtype)
    active[1, 2, 1, 15, 23] = bad
    for copies in (native_ops(), plain_ops()):
        tensors = pool_tensors(LAYERS, 7, 2, 16, 24, dtype)
        report = store(copies, [active], tensors, [1, 2, 3], [0, 1, 2])
        assert report == [STORED, STORED | NON_FINITE, STORED]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_values_never_come_back_infinite_without_a_report(dtype):
    largest = torch.finfo(dtype).max
    active = torch.full((1, 1, 1, 8, 8), largest, dtype=dtype)
    active[..., 1] = -largest / 2
    for copies in (native_ops(), plain_ops()):
        tensors = pool_tensors(1, 1, 1, 8, 8, dtype)
        report = store(copies, [active], tensors, [0], [0])
        back = torch.zeros_like(active)
        copies.load(*tensors, [back], torch.tensor([0]), torch.tensor([0]))
        finite = bool(torch.isfinite(back).all())
        assert report == [STORED if finite else STORED | NON_FINITE]
        # The scale of float32 and bfloat16 rounds up here, and 127 of it overflow; that of a
        # float16 state is a float, much finer than the state.
        assert finite == (dtype == torch.float16)


def test_empty_lists_and_no_layers_do_nothing():
    tensors = pool_tensors(1, 2, 1, 8, 8, torch.float32, fill=5)
    active = [torch.ones(1, 2, 1, 8, 8)]
    assert store(native_ops(), active, tensors, [], []) == []
    assert (tensors[0] == 5).all()
    none = pool_tensors(0, 2, 1, 8, 8, torch.float32)
    assert store(native_ops(), [torch.ones(0, 2, 1, 8, 8)], none, [0], [0]) == [0]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.parametrize("row", [(1,), (3,), (16, 4), (70, 1000)])
@pytest.mark.parametrize("slot_dim", [0, 1])
def test_rows_move_bit_for_bit(dtype, row, slot_dim):
    layers = (3,) if slot_dim else ()
    generator = torch.Generator().manual_seed(1)
    source = torch.randint(0, 256, (*layers, SLOTS, *row), generator=generator).to(dtype)
    results = []
    for copies in (native_ops(), plain_ops()):
        target = torch.full((*layers, 7, *row), 3, dtype=dtype)
        move(copies, source, target, ACTIVE_SLOTS, CHECKPOINT_SLOTS, slot_dim)
        results.append(target)
    assert torch.equal(*results)
    assert torch.equal(results[0].select(slot_dim, 6), source.select(slot_dim, 0))
    assert (results[0].select(slot_dim, 0) == 3).all()


def rows_of_many_kinds(fill=None):
    """Tensors of 5 slots: other lengths, types, distances and layers, one of them without bytes."""
    generator = torch.Generator().manual_seed(2)
    wide = torch.randint(0, 256, (SLOTS, 40), dtype=torch.uint8, generator=generator)
    tensors = [
        torch.randn(3, SLOTS, 7, generator=generator),
        wide[:, 3:20],
        torch.randint(0, 99, (SLOTS, 2, 5), dtype=torch.int16, generator=generator),
        torch.zeros(2, SLOTS, 0),
        torch.randn(SLOTS, 30000, generator=generator).bfloat16(),
    ]
    if fill is not None:
        tensors = [torch.full_like(tensor, fill) for tensor in tensors]
    return tensors, [1, 0, 0, 1, 0]


def test_rows_of_many_kinds_move_in_one_call():
    sources, slot_dims = rows_of_many_kinds()
    for copies in (native_ops(), plain_ops()):
        targets, _ = rows_of_many_kinds(fill=7)
        report = torch.zeros(4, dtype=torch.int32)
        slots = vector([4, -1, 0, 5]), vector([1, 0, 3, 2])
        copies.move(sources, targets, *slots, slot_dims, report)
        assert report.tolist() == [STORED, 0, STORED, 0]
        for source, target, dim in zip(sources, targets, slot_dims, strict=True):
            for taken, given in ((4, 1), (0, 3)):
                assert torch.equal(target.select(dim, given), source.select(dim, taken))
            assert (target.index_select(dim, vector([0, 2, 4])) == 7).all()


@pytest.mark.parametrize("layers", [191, 192, 193, 400])
def test_more_rows_than_one_launch_takes(layers):
    """Of 17 lengths in turn, one more than a launch has room for."""
    sources = [torch.full((2, 1 + layer % 17), layer, dtype=torch.int16) for layer in range(layers)]
    targets = [torch.zeros_like(source) for source in sources]
    report = torch.zeros(1, dtype=torch.int32)
    native_ops().move(sources, targets, vector([1]), vector([0]), [0] * layers, report)
    assert report.tolist() == [STORED]
    for layer, target in enumerate(targets):
        assert (target[0] == layer).all()
        assert (target[1] == 0).all()


def test_rows_that_are_not_there_are_not_reported():
    for copies in (native_ops(), plain_ops()):
        report = torch.zeros(1, dtype=torch.int32)
        copies.move([], [], vector([0]), vector([0]), [], report)
        nothing = [torch.zeros(2, 0)]
        copies.move(nothing, nothing, vector([0]), vector([1]), [0], report)
        assert report.tolist() == [0]


def test_slots_beyond_their_pool_are_skipped():
    for copies in (native_ops(), plain_ops()):
        active = [torch.ones(1, 2, 1, 8, 8)]
        tensors = pool_tensors(1, 2, 1, 8, 8, torch.float32)
        assert store(copies, active, tensors, [2, 0, 1], [0, 9, 1]) == [0, 0, STORED]
        assert tensors[0][:, 0].abs().sum() == 0
        copies.load(*tensors, active, vector([1, 2]), vector([5, 0]))
        assert (active[0] == 1).all()
        moved = torch.zeros(1, 2, 4)
        move(copies, torch.ones(1, 3, 4), moved, [3, 2], [0, 2], 1)
        assert moved.abs().sum() == 0


@pytest.mark.parametrize("empty", ["layers", "heads", "listed"])
def test_nothing_to_store_is_reported_as_not_stored(empty):
    layers, heads = int(empty != "layers"), int(empty != "heads")
    listed = [] if empty == "listed" else [0]
    active = [torch.ones(layers, 2, heads, 8, 8)]
    for copies in (native_ops(), plain_ops()):
        tensors = pool_tensors(layers, 2, heads, 8, 8, torch.float32)
        assert store(copies, active, tensors, listed, listed) == [0] * len(listed)


def test_torch_traces_through_the_copies():
    native_ops()
    quantized, scale = pool_tensors(1, 2, 1, 8, 8, torch.float32)
    report = torch.zeros(1, dtype=torch.int32)
    slots = torch.tensor([1])
    active = make_state((1, 2, 1, 8, 8), torch.float32)
    ops = torch.ops.statecache
    torch.library.opcheck(
        ops.checkpoint_store.default, ([active], quantized, scale, report, slots, slots)
    )
    torch.library.opcheck(ops.checkpoint_load.default, (quantized, scale, [active], slots, slots))
    torch.library.opcheck(
        ops.checkpoint_move.default,
        ([active], [active.clone()], slots, slots.flip(0), [1], report),
    )
