"""The CUDA copies against the plain torch reference on the CPU, bit for bit."""

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

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

SHAPES = [(2, v, k) for v in (64, 128, 256) for k in (64, 128, 256)] + [(3, 8, 8), (1, 24, 40)]
ACTIVE_SLOTS = [3, -1, 0, 4, 2, 99]
CHECKPOINT_SLOTS = [1, 0, 6, -1, 2, 3]


def on_gpu(tensors):
    return [tensor.cuda() for tensor in tensors]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_the_reference(shape, dtype):
    copies = ops_for("cuda")
    assert copies.name == "native"
    active = make_state((LAYERS, SLOTS, *shape), dtype)
    active[1, 2, 0, 3, 5] = float("nan")
    active_slots, slots = torch.tensor(ACTIVE_SLOTS), torch.tensor(CHECKPOINT_SLOTS)
    expected = pool_tensors(LAYERS, 7, *shape, dtype, fill=77)
    got = on_gpu(expected)
    expected_report = torch.zeros(6, dtype=torch.int32)
    report = expected_report.cuda()
    plain_ops().store([active], *expected, expected_report, active_slots, slots)
    copies.store([active.cuda()], *got, report, active_slots.cuda(), slots.cuda())
    assert report.tolist() == expected_report.tolist() == [1, 0, 1, 0, 3, 0]
    finite = [slot for slot in range(7) if slot != 2]
    for ours, theirs in zip(got, expected, strict=True):
        assert same_bits(ours.cpu()[:, finite], theirs[:, finite])
    back, expected_back = torch.full_like(active, 7).cuda(), torch.full_like(active, 7)
    slots[4] = -1
    plain_ops().load(*expected, [expected_back], slots, active_slots)
    copies.load(*got, [back], slots.cuda(), active_slots.cuda())
    assert same_bits(back.cpu(), expected_back)


def test_many_random_floats_agree():
    generator = torch.Generator().manual_seed(5)
    active = torch.rand(4, 8, 4, 256, 256, generator=generator)
    slots = torch.arange(8)
    expected = pool_tensors(4, 8, 4, 256, 256, torch.float32)
    got = on_gpu(expected)
    report = torch.zeros(8, dtype=torch.int32)
    plain_ops().store([active], *expected, report.clone(), slots, slots)
    ops_for("cuda").store([active.cuda()], *got, report.cuda(), slots.cuda(), slots.cuda())
    assert all(same_bits(a.cpu(), b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("row", [(1,), (6,), (16, 5), (3000,)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_rows_move_bit_for_bit(dtype, row):
    source = torch.randint(0, 256, (3, SLOTS, *row)).to(dtype)
    expected = torch.zeros(3, 7, *row, dtype=dtype)
    got = expected.cuda()
    active_slots, slots = torch.tensor(ACTIVE_SLOTS), torch.tensor(CHECKPOINT_SLOTS)
    plain_ops().move([source], [expected], active_slots, slots, [1], None)
    on_device = active_slots.cuda(), slots.cuda()
    ops_for("cuda").move([source.cuda()], [got], *on_device, [1], None)
    assert torch.equal(got.cpu(), expected)


def test_a_graph_captures_store_and_load():
    copies = ops_for("cuda")
    active = make_state((LAYERS, SLOTS, 2, 128, 128), torch.bfloat16).cuda()
    back = torch.zeros_like(active)
    tensors = on_gpu(pool_tensors(LAYERS, SLOTS, 2, 128, 128, torch.bfloat16))
    report = torch.zeros(SLOTS, dtype=torch.int32, device="cuda")
    slots = torch.arange(SLOTS, device="cuda")
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
def test_a_pool_on_the_gpu(mode, dtype):
    check_a_pool("cuda", mode, dtype)


def pool_of_ones():
    temporal = torch.ones(LAYERS, SLOTS, 2, 64, 64, device="cuda")
    active = ActiveState(temporal, [torch.randn(LAYERS, SLOTS, 9, 3, device="cuda")])
    return active, CheckpointPool(active, 2)


def test_a_report_is_read_on_another_stream():
    active, pool = pool_of_ones()
    active.temporal[0, 1, 0, 0, 0] = float("nan")
    torch.cuda.synchronize()
    slots = pool.alloc(2)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)
        report = pool.store(active, [0, 1], slots)
    assert report.refused() == (slots[1],)


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


def test_a_pool_is_not_captured():
    active, pool = pool_of_ones()
    slots = pool.alloc(1)
    pool.store(active, [0], slots).refused()
    for call in (
        lambda: pool.store(active, [0], slots),
        lambda: pool.load(slots, active, [1]),
    ):
        with (
            pytest.raises(RuntimeError, match="while a CUDA graph is captured"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            call()
    pool.load(slots, active, [2])
