"""The format of the int8 checkpoint, worked out by hand on tiny channels."""

import pytest
import torch

from statecache.checkpoint import reference


def test_a_channel_by_hand():
    # amax 254 -> scale 2. 127/2 = 63.5 and 1/2 = 0.5 and 3/2 = 1.5 round to the even neighbour.
    state = torch.tensor([254.0, -254.0, 127.0, 1.0, 3.0, -3.0, 5.0, 0.0]).reshape(8, 1)
    levels, scale = reference.quantize(state)
    assert scale.tolist() == [[2.0]]
    assert levels.flatten().tolist() == [127, -127, 64, 0, 2, -2, 2, 0]
    back = reference.dequantize(levels, scale, torch.float32)
    assert back.flatten().tolist() == [254.0, -254.0, 128.0, 0.0, 4.0, -4.0, 4.0, 0.0]


def test_each_column_has_its_own_scale():
    state = torch.tensor([[127.0, 0.0, -254.0], [-1.0, 0.0, 2.0]])
    levels, scale = reference.quantize(state)
    smallest = (torch.tensor(1e-8) / torch.tensor(127.0)).item()
    assert scale.tolist() == [[1.0, smallest, 2.0]]
    assert levels.tolist() == [[127, 0, -127], [-1, 0, 1]]


def test_a_bfloat16_scale_is_rounded_to_bfloat16():
    # 100 / 127 = 0.78740...; bfloat16 has 8 bits: 0.78740 * 256 = 201.57 -> 202 / 256.
    state = torch.tensor([[100.0], [50.0]], dtype=torch.bfloat16)
    levels, scale = reference.quantize(state)
    assert scale.dtype == torch.bfloat16
    assert scale.item() == 202 / 256
    # 100 / 0.7890625 = 126.73 -> 127; 50 / 0.7890625 = 63.37 -> 63.
    assert levels.flatten().tolist() == [127, 63]
    # 127 * 202/256 = 100.2109: bfloat16 has steps of 0.5 there. 63 * 202/256 = 49.711, steps 0.25.
    assert reference.dequantize(levels, scale, torch.bfloat16).flatten().tolist() == [100.0, 49.75]


def test_a_float16_scale_would_underflow_and_is_a_float():
    state = torch.tensor([[6.0e-8]], dtype=torch.float16)  # the smallest: 2**-24
    levels, scale = reference.quantize(state)
    assert scale.dtype == torch.float32
    assert scale.item() > 0
    assert levels.item() == 127
    assert reference.dequantize(levels, scale, torch.float16).item() == state.item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_column_of_zeros_comes_back_as_zeros(dtype):
    state = torch.zeros(8, 2, dtype=dtype)
    levels, scale = reference.quantize(state)
    assert torch.equal(reference.dequantize(levels, scale, dtype), state)


def test_reports():
    active = torch.ones(2, 5, 1, 8, 8, dtype=torch.bfloat16)
    active[1, 1, 0, 3, 3] = float("nan")
    active[0, 2, 0, 7, 0] = float("-inf")
    # (2 - 2**-7) * 2**127 / 127 rounds up to a bfloat16 that times 127 is beyond the largest one.
    active[0, 3, 0, 0, 0] = torch.finfo(torch.bfloat16).max
    quantized = torch.zeros(2, 6, 1, 8, 8, dtype=torch.int8)
    scale = torch.zeros(2, 6, 1, 1, 8, dtype=torch.bfloat16)
    report = torch.zeros(6, dtype=torch.int32)
    reference.store(
        [active],
        quantized,
        scale,
        report,
        torch.tensor([0, 1, 2, 3, -1, 4]),
        torch.tensor([5, 4, 3, 2, 1, -1]),
    )
    both = reference.STORED | reference.NON_FINITE
    assert report.tolist() == [reference.STORED, both, both, both, 0, 0]
    assert quantized[:, :2].abs().sum() == 0
    assert scale[:, :2].abs().sum() == 0
