"""The copies on the device at hand against the plain torch reference on the CPU, bit for bit.

Without a GPU the CPU's copies are tested, as a rehearsal; what needs streams or graphs is skipped.
"""

import warnings

import pytest
import torch

from statecache.checkpoint.ops import ops_for, plain_ops
from statecache.checkpoint.pool import ActiveState, CheckpointPool
from support.checkpoint_cases import (
    DTYPES,
    LAYERS,
    SLOTS,
    check_a_pool,
    make_state,
    pool_tensors,
    same_bits,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")

SHAPES = [(2, v, k) for v in (64, 128, 256) for k in (64, 128, 256)] + [(3, 8, 8), (1, 24, 40)]
SHAPES += [(2, 80, 128), (1, 520, 72)]
ACTIVE_SLOTS = [3, -1, 0, 4, 2, 99]
CHECKPOINT_SLOTS = [1, 0, 6, -1, 2, 3]


def on_device(tensors):
    return [tensor.to(DEVICE, copy=True) for tensor in tensors]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_the_reference(shape, dtype):
    copies = ops_for(DEVICE)
    assert copies.name == "native"
    active = make_state((LAYERS, SLOTS, *shape), dtype)
    active[1, 2, 0, 3, 5] = float("nan")
    active_slots, slots = torch.tensor(ACTIVE_SLOTS), torch.tensor(CHECKPOINT_SLOTS)
    expected = pool_tensors(LAYERS, 7, *shape, dtype, fill=77)
    got = on_device(expected)
    expected_report = torch.zeros(6, dtype=torch.int32)
    report = expected_report.to(DEVICE, copy=True)
    plain_ops().store([active], *expected, expected_report, active_slots, slots)
    copies.store([active.to(DEVICE)], *got, report, active_slots.to(DEVICE), slots.to(DEVICE))
    assert report.tolist() == expected_report.tolist() == [1, 0, 1, 0, 3, 0]
    finite = [slot for slot in range(7) if slot != 2]
    for ours, theirs in zip(got, expected, strict=True):
        assert same_bits(ours.cpu()[:, finite], theirs[:, finite])
    back, expected_back = torch.full_like(active, 7).to(DEVICE), torch.full_like(active, 7)
    slots[4] = -1
    plain_ops().load(*expected, [expected_back], slots, active_slots)
    copies.load(*got, [back], slots.to(DEVICE), active_slots.to(DEVICE))
    assert same_bits(back.cpu(), expected_back)


def test_many_random_floats_agree():
    generator = torch.Generator().manual_seed(5)
    active = torch.rand(4, 8, 4, 256, 256, generator=generator)
    slots = torch.arange(8)
    expected = pool_tensors(4, 8, 4, 256, 256, torch.float32)
    got = on_device(expected)
    report = torch.zeros(8, dtype=torch.int32)
    plain_ops().store([active], *expected, report.clone(), slots, slots)
    ops_for(DEVICE).store(
        [active.to(DEVICE)], *got, report.to(DEVICE), slots.to(DEVICE), slots.to(DEVICE)
    )
    assert all(same_bits(a.cpu(), b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("row", [(1,), (6,), (16, 5), (3000,)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_rows_move_bit_for_bit(dtype, row):
    source = torch.randint(0, 256, (3, SLOTS, *row)).to(dtype)
    expected = torch.zeros(3, 7, *row, dtype=dtype)
    got = expected.to(DEVICE, copy=True)
    active_slots, slots = torch.tensor(ACTIVE_SLOTS), torch.tensor(CHECKPOINT_SLOTS)
    plain_ops().move([source], [expected], active_slots, slots, [1], None)
    listed = active_slots.to(DEVICE), slots.to(DEVICE)
    ops_for(DEVICE).move([source.to(DEVICE)], [got], *listed, [1], None)
    assert torch.equal(got.cpu(), expected)


@needs_gpu
def test_a_graph_captures_store_and_load():
    copies = ops_for(DEVICE)
    active = make_state((LAYERS, SLOTS, 2, 128, 128), torch.bfloat16).to(DEVICE)
    back = torch.zeros_like(active)
    tensors = on_device(pool_tensors(LAYERS, SLOTS, 2, 128, 128, torch.bfloat16))
    report = torch.zeros(SLOTS, dtype=torch.int32, device=DEVICE)
    slots = torch.arange(SLOTS, device=DEVICE)
    # A first launch loads its kernel.
    copies.store([active], *tensors, report, slots, slots)
    copies.load(*tensors, [back], slots, slots)
    for tensor in (*tensors, back, report):
        tensor.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copies.store([active], *tensors, report, slots, slots)
        copies.load(*tensors, [back], slots, slots)
    assert back.abs().sum() == 0
    graph.replay()
    torch.cuda.synchronize()
    assert report.tolist() == [1] * SLOTS
    assert back[:, :, :, 0, 4].abs().min() > 900


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["int8", "native"])
def test_a_pool_on_the_device(mode, dtype):
    check_a_pool(DEVICE, mode, dtype)


def pool_of_ones():
    temporal = torch.ones(LAYERS, SLOTS, 2, 64, 64, device=DEVICE)
    active = ActiveState(temporal, [torch.randn(LAYERS, SLOTS, 9, 3, device=DEVICE)])
    return active, CheckpointPool(active, 2)


@needs_gpu
def test_a_report_is_read_on_another_stream():
    active, pool = pool_of_ones()
    active.temporal[0, 1, 0, 0, 0] = float("nan")
    torch.cuda.synchronize()
    slots = pool.alloc(2)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)
        report = pool.store(active, [0, 1], slots)
    assert report.refused() == (slots[1],)


@needs_gpu
def test_copies_on_other_streams_wait_for_each_other():
    active, pool = pool_of_ones()
    (slot,) = pool.alloc(1)
    pool.store(active, [0], [slot]).refused()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        torch.cuda._sleep(200_000_000)
        pool.load([slot], active, [3])
    active.temporal[:, 1] = 5
    torch.cuda.current_stream().synchronize()
    with torch.cuda.stream(second):
        pool.store(active, [1], [slot])  # must not overtake the load
    torch.cuda.synchronize()
    assert (active.temporal[:, 3] - 1).abs().max() < 0.01


@needs_gpu
def test_a_pool_is_not_captured():
    active, pool = pool_of_ones()
    slots = pool.alloc(1)
    pool.store(active, [0], slots).refused()
    for call in (
        lambda: pool.store(active, [0], slots),
        lambda: pool.load(slots, active, [1]),
    ):
        # Nothing is captured, of which torch warns.
        with (
            warnings.catch_warnings(action="ignore"),
            pytest.raises(RuntimeError, match="while a CUDA graph is captured"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            call()
    pool.load(slots, active, [2])


def test_rows_of_many_lengths_move_in_one_launch():
    """Misaligned by one byte, of other lengths and distances, layers in front or not."""
    wide = torch.randint(0, 256, (SLOTS, 5000), dtype=torch.uint8)
    sources = [torch.randn(36, SLOTS, 24576).bfloat16(), wide[:, 1:4400], torch.randn(SLOTS, 3)]
    expected = [torch.zeros_like(source) for source in sources]
    got = on_device(expected)
    active_slots, slots = torch.tensor(ACTIVE_SLOTS), torch.tensor([1, 0, 4, -1, 2, 3])
    report = torch.zeros(6, dtype=torch.int32)
    plain_ops().move(sources, expected, active_slots, slots, [1, 0, 0], report)
    found = torch.zeros(6, dtype=torch.int32, device=DEVICE)
    listed = active_slots.to(DEVICE), slots.to(DEVICE)
    ops_for(DEVICE).move(on_device(sources), got, *listed, [1, 0, 0], found)
    assert found.tolist() == report.tolist() == [1, 0, 1, 0, 1, 0]
    assert all(torch.equal(ours.cpu(), theirs) for ours, theirs in zip(got, expected, strict=True))
