"""How far a state may be from itself after it was cached, and after it was cached many times."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from statecache.checkpoint import reference
from statecache.checkpoint.ops import native_ops
from support.checkpoint_cases import BOUND, is_close, step_of

CYCLES = 12


def round_trip(state):
    """Store and load `[heads, d_v, d_k]`; return the state and the size of a step."""
    active = state[None, None].clone()
    levels = torch.zeros(active.shape, dtype=torch.int8)
    scale_type = reference.scale_dtype(state.dtype)
    scale = torch.zeros(1, 1, state.shape[0], 1, state.shape[2], dtype=scale_type)
    report, slot = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    native_ops().store([active], levels, scale, report, slot, slot)
    assert report.item() == reference.STORED
    native_ops().load(levels, scale, [active], slot, slot)
    return active[0, 0], step_of(state)


@pytest.mark.parametrize("dtype", list(BOUND))
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(data=st.data())
def test_one_round_trip(dtype, data):
    width = {torch.float32: 32, torch.float16: 16, torch.bfloat16: 32}[dtype]
    largest = 60000.0 if dtype == torch.float16 else 2.0**100
    element = st.floats(-largest, largest, width=width)
    values = data.draw(st.lists(element, min_size=64, max_size=64))
    state = torch.tensor(values).to(dtype).reshape(1, 8, 8)
    back, _ = round_trip(state)
    assert is_close(back, state)


@pytest.mark.parametrize("dtype", list(BOUND))
def test_twelve_cycles_do_not_drift(dtype):
    """Twelve cycles of store, load and a small update stay within twelve independent roundings.

    Worst case: each cycle adds at most BOUND steps, and half a unit of the state's type for the
    addition. Typical: a rounding to a level is uniform over one step, with a variance of 1/12 of
    its square; rounding to the state's type, at the load and at the addition, adds at most
    1/12 of its unit squared each, the unit being at most 127 steps times the type's epsilon, and
    the bfloat16 scale, off by at most 2**-9 of itself, moves no element by more than 127 * 2**-9
    steps. Roundings that are independent add up in squares; a drift would add up as it is.
    """
    generator = torch.Generator().manual_seed(12)
    shape = (4, 128, 128)
    state = torch.randn(shape, generator=generator).to(dtype)
    exact = state.double()
    worst = torch.zeros(1).double()
    square = torch.zeros(1).double()
    unit = 127 * torch.finfo(dtype).eps
    for _ in range(CYCLES):
        back, step = round_trip(state)
        update = (0.05 * torch.randn(shape, generator=generator)).to(dtype)
        exact = exact + update.double()
        state = back + update
        worst = worst + (BOUND[dtype] + unit / 2) * step
        square = square + (1 + 2 * unit**2) / 12 * step**2
    error = state.double() - exact
    assert (error.abs() <= worst).all()
    assert error.square().mean().sqrt() <= 1.05 * square.mean().sqrt()
    # No bias: the mean of so many errors is near 0, well within one standard error times 5.
    assert error.mean().abs() <= 5 * square.mean().sqrt() / error.numel() ** 0.5
