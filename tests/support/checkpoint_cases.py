"""States that are hard to quantise, shared by the checkpoint tests."""

import torch

from statecache.checkpoint.pool import ActiveState, CheckpointPool

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LAYERS, SLOTS = 2, 5
# Of one element after one store and load, in steps of its column (largest magnitude / 127).
BOUND = {torch.float32: 0.501, torch.float16: 0.6, torch.bfloat16: 1.0}
# A float16 near zero is a multiple of 2**-24: half of that is lost to the result's rounding.
GRAIN = {torch.float32: 0.0, torch.float16: 2.0**-25, torch.bfloat16: 0.0}


def step_of(state):
    """Return the size of a step of each column of `[..., d_v, d_k]`."""
    return state.double().abs().amax(-2, keepdim=True).clamp(min=1e-8) / 127


def is_close(back, state):
    """Whether `back` is `state` after one store and load, within the bound of its type."""
    bound = BOUND[state.dtype] * step_of(state) + GRAIN[state.dtype]
    return bool(((back.double() - state.double()).abs() <= bound).all())


def make_state(shape, dtype, seed=0):
    """Return normal values of many magnitudes, with one hard column of each kind in each head."""
    generator = torch.Generator().manual_seed(seed)
    columns = torch.randn(*shape[:-2], 1, shape[-1], generator=generator) * 3
    state = (
        (torch.randn(*shape, generator=generator) * torch.exp(columns)).clamp(-6e4, 6e4).to(dtype)
    )
    tiny = torch.finfo(dtype).smallest_normal
    subnormal = torch.finfo(dtype).tiny / 8
    state[..., 0] = 0
    state[..., 1] = state[..., 1].sign() * subnormal
    state[..., 2] = state[..., 2].sign() * tiny
    state[..., 3] = 0.25
    state[..., 4] *= torch.finfo(dtype).eps
    state[..., 0, 4] = 1000.0
    # Half levels: quotients k + 0.5 exactly, where the scale is exact.
    state[..., 5] = (torch.arange(shape[-2]) % 127).to(dtype) + 0.5
    state[..., 0, 5] = 127.0
    return state


def pool_tensors(layers, slots, heads, d_v, d_k, dtype, fill=0):
    """Return int8 states and scales, filled with a value that a copy must overwrite."""
    scale_dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    quantized = torch.full((layers, slots, heads, d_v, d_k), fill, dtype=torch.int8)
    scale = torch.full((layers, slots, heads, 1, d_k), float(fill), dtype=scale_dtype)
    return quantized, scale


def same_bits(a, b):
    """Whether two tensors are equal bit for bit, signs of zero included."""
    if a.is_floating_point():
        view = torch.int32 if a.dtype == torch.float32 else torch.int16
        a, b = a.contiguous().view(view), b.contiguous().view(view)
    return torch.equal(a, b)


def check_a_pool(device, mode, dtype):
    """Store two states by a tensor of slots, load them into other slots, compare."""
    temporal = make_state((LAYERS, SLOTS, 2, 64, 64), dtype).to(device)
    active = ActiveState(temporal, [torch.randn(LAYERS, SLOTS, 9, 3, device=device)])
    pool = CheckpointPool(active, 3, mode=mode)
    slots = pool.alloc(2)
    report = pool.store(active, torch.tensor([1, 0], device=device), slots)
    assert report.refused() == ()
    pool.load(slots, active, [3, 4])
    assert torch.equal(active.conv[0][:, [3, 4]], active.conv[0][:, [1, 0]])
    if mode == "native":
        assert same_bits(temporal[:, [3, 4]], temporal[:, [1, 0]])
    assert is_close(temporal[:, [3, 4]], temporal[:, [1, 0]])


def vector(slots):
    return torch.tensor(slots, dtype=torch.int64)


def store(copies, active, tensors, active_slots, slots):
    report = torch.zeros(len(slots), dtype=torch.int32)
    copies.store(active, *tensors, report, vector(active_slots), vector(slots))
    return report.tolist()


def move(copies, source, target, source_slots, target_slots, slot_dim):
    slots = vector(source_slots), vector(target_slots)
    copies.move([source], [target], *slots, [slot_dim], None)
