"""The native copies against the plain torch reference, bit for bit."""

import subprocess
import sys

import pytest
import torch

from checkpoint_cases import DTYPES, LAYERS, SLOTS, make_state, pool_tensors, same_bits
from statecache.checkpoint_copies import (
    NON_FINITE,
    STORED,
    copies_for,
    native_copies,
    plain_copies,
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


def vector(slots):
    return torch.tensor(slots, dtype=torch.int64)


def store(copies, active, tensors, active_slots, slots):
    report = torch.zeros(len(slots), dtype=torch.int32)
    copies.store(active, *tensors, report, vector(active_slots), vector(slots))
    return report.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_store_and_load_agree_with_the_reference(shape, dtype):
    active = [make_state((LAYERS, SLOTS, *shape), dtype)]
    results = []
    for copies in (native_copies(), plain_copies()):
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
    store(plain_copies(), [strided.contiguous()], expected, ACTIVE_SLOTS, CHECKPOINT_SLOTS)
    for active in ([strided], apart):
        got = pool_tensors(LAYERS, 7, *shape, dtype)
        store(native_copies(), active, got, ACTIVE_SLOTS, CHECKPOINT_SLOTS)
        assert all(map(same_bits, got, expected))
    before = wide.clone()
    for active in ([strided], apart):
        wide.zero_()
        native_copies().load(
            *expected, active, torch.tensor(CHECKPOINT_SLOTS), torch.tensor(ACTIVE_SLOTS)
        )
        assert wide[:2, :, 1::2].abs().sum() == 0  # the heads between are not ours
        assert wide[2].abs().sum() == 0
        assert wide[:2, [3, 0, 2], ::2].abs().sum() > 0
    wide.copy_(before)


def test_more_layers_than_one_launch_takes():
    active = [make_state((1, 1, 8, 8), torch.bfloat16, seed=layer) for layer in range(131)]
    got, expected = (pool_tensors(131, 1, 1, 8, 8, torch.bfloat16) for _ in range(2))
    store(native_copies(), active, got, [0], [0])
    store(plain_copies(), active, expected, [0], [0])
    assert all(map(same_bits, got, expected))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_reported(dtype, bad):
    active = torch.ones(LAYERS, SLOTS, 2, 16, 24, dtype=dtype)
    active[1, 2, 1, 15, 23] = bad
    for copies in (native_copies(), plain_copies()):
        tensors = pool_tensors(LAYERS, 7, 2, 16, 24, dtype)
        report = store(copies, [active], tensors, [1, 2, 3], [0, 1, 2])
        assert report == [STORED, STORED | NON_FINITE, STORED]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_values_never_come_back_infinite_without_a_report(dtype):
    largest = torch.finfo(dtype).max
    active = torch.full((1, 1, 1, 8, 8), largest, dtype=dtype)
    active[..., 1] = -largest / 2
    for copies in (native_copies(), plain_copies()):
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
    assert store(native_copies(), active, tensors, [], []) == []
    assert (tensors[0] == 5).all()
    none = pool_tensors(0, 2, 1, 8, 8, torch.float32)
    assert store(native_copies(), [torch.ones(0, 2, 1, 8, 8)], none, [0], [0]) == [0]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.parametrize("row", [(1,), (3,), (16, 4), (70, 1000)])
@pytest.mark.parametrize("slot_dim", [0, 1])
def test_rows_move_bit_for_bit(dtype, row, slot_dim):
    layers = (3,) if slot_dim else ()
    generator = torch.Generator().manual_seed(1)
    source = torch.randint(0, 256, (*layers, SLOTS, *row), generator=generator).to(dtype)
    results = []
    for copies in (native_copies(), plain_copies()):
        target = torch.full((*layers, 7, *row), 3, dtype=dtype)
        copies.move(
            source, target, torch.tensor(ACTIVE_SLOTS), torch.tensor(CHECKPOINT_SLOTS), slot_dim
        )
        results.append(target)
    assert torch.equal(*results)
    assert torch.equal(results[0].select(slot_dim, 6), source.select(slot_dim, 0))
    assert (results[0].select(slot_dim, 0) == 3).all()


def test_arguments_that_do_not_fit_are_refused():
    active = torch.ones(1, 2, 1, 8, 8)
    quantized, scale = pool_tensors(1, 2, 1, 8, 8, torch.float32)
    copies = native_copies()
    for bad_active, bad_quantized, bad_scale, reason in [
        (active.double(), quantized, scale, "float32, float16 or bfloat16"),
        (active.bfloat16(), quantized, scale, "scales do not fit"),
        (active, quantized[:, :, :, :, :4], scale, "do not fit the active"),
        (active.transpose(3, 4), quantized, scale, "without gaps"),
        (torch.ones(1, 2, 1, 8, 12), quantized, scale, "multiples of 8"),
    ]:
        with pytest.raises(RuntimeError, match=reason):
            store(copies, [bad_active], (bad_quantized, bad_scale), [0], [0])
    with pytest.raises(RuntimeError, match="slot 2 is not below 2"):
        store(copies, [active], (quantized, scale), [2], [0])
    with pytest.raises(RuntimeError, match="slot 9 is not below 2"):
        store(copies, [active], (quantized, scale), [0], [9])
    with pytest.raises(RuntimeError, match="no state tensor"):
        copies.load(quantized, scale, [], torch.tensor([0]), torch.tensor([0]))


def test_torch_traces_through_the_copies():
    native_copies()
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
        ops.checkpoint_move.default, (active, active.clone(), slots, slots.flip(0), 1)
    )


def test_the_package_imports_without_torch():
    code = "import sys; import statecache; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_the_native_copies_the_loader_says_why_and_uses_plain_torch():
    code = """
import logging, sys
sys.modules["statecache._checkpoint_ops"] = None
logging.basicConfig(format="%(levelname)s %(message)s")
from statecache.checkpoint_copies import copies_for, native_copies
print(copies_for("cpu").name, copies_for("cpu").name)
try:
    native_copies()
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("torch torch\nstatecache was installed without its checkpoint")
    assert done.stderr.count("WARNING") == 1
    assert "pip install --force-reinstall --no-deps --no-cache-dir statecache" in done.stderr


def test_a_device_without_a_kernel_uses_plain_torch(caplog):
    assert copies_for("xpu") is plain_copies()
    assert "without checkpoint kernels for xpu" in caplog.text
