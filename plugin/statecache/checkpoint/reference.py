"""The checkpoint copy again, as plain torch operators: slow, obvious, on any device.

It is the oracle of the tests, and what runs on devices without a kernel. The functions take the
same arguments as the native operators in `statecache.checkpoint.ops`, which holds the contracts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

STORED = 1
NON_FINITE = 2
MIN_MAGNITUDE = 1e-8
MAX_LEVEL = 127


def scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the scale's type for states of `dtype`: a float16 scale would underflow."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def quantize(state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the int8 levels and the scales of `[..., d_v, d_k]`: one scale a column."""
    wide = state.to(torch.float32)
    magnitude = wide.abs().amax(dim=-2, keepdim=True).clamp(min=MIN_MAGNITUDE)
    # The divisor is a tensor: on CUDA, torch multiplies by the inverse of a plain number.
    divisor = torch.full((), MAX_LEVEL, dtype=torch.float32, device=state.device)
    scale = (magnitude / divisor).to(scale_dtype(state.dtype))
    levels = torch.round(wide / scale.to(torch.float32)).clamp(-MAX_LEVEL, MAX_LEVEL)
    return levels.to(torch.int8), scale


def dequantize(levels: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the states that `levels` and `scale` stand for."""
    return (levels.to(torch.float32) * scale.to(torch.float32)).to(dtype)


def store(
    active: Sequence[Tensor],
    quantized: Tensor,
    scale: Tensor,
    report: Tensor,
    active_slots: Tensor,
    slots: Tensor,
) -> None:
    """See `ops.CheckpointOps.store`."""
    if quantized.numel() == 0:
        return
    listed = _valid(active_slots, _slot_count(active), slots, quantized.shape[1])
    sources, targets = active_slots[listed], slots[listed]
    levels, scales = quantize(_gather(active, sources))
    quantized[:, targets] = levels
    scale[:, targets] = scales
    top = dequantize(torch.full_like(scales, MAX_LEVEL, dtype=torch.int8), scales, active[0].dtype)
    finite = torch.isfinite(top).all(dim=4).all(dim=3).all(dim=2).all(dim=0)
    report[listed] |= torch.where(finite, STORED, STORED | NON_FINITE).to(torch.int32)


def load(
    quantized: Tensor,
    scale: Tensor,
    active: Sequence[Tensor],
    slots: Tensor,
    active_slots: Tensor,
) -> None:
    """See `ops.CheckpointOps.load`."""
    listed = _valid(slots, quantized.shape[1], active_slots, _slot_count(active))
    sources, targets = slots[listed], active_slots[listed]
    states = dequantize(quantized[:, sources], scale[:, sources], active[0].dtype)
    if active[0].dim() == 5:
        active[0][:, targets] = states
    else:
        for layer, state in zip(active, states, strict=True):
            layer[targets] = state


def move(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    source_slots: Tensor,
    target_slots: Tensor,
    slot_dims: Sequence[int],
    report: Tensor | None,
) -> None:
    """See `ops.CheckpointOps.move`."""
    if not any(source.numel() for source in sources):
        return
    dim = slot_dims[0]
    listed = _valid(source_slots, sources[0].shape[dim], target_slots, targets[0].shape[dim])
    taken, given = source_slots[listed], target_slots[listed]
    for source, target, dim in zip(sources, targets, slot_dims, strict=True):
        target.index_copy_(dim, given, source.index_select(dim, taken))
    if report is not None:
        report[listed] |= STORED


def _slot_count(active: Sequence[Tensor]) -> int:
    return active[0].shape[active[0].dim() - 4]


def _gather(active: Sequence[Tensor], slots: Tensor) -> Tensor:
    if active[0].dim() == 5:
        return active[0][:, slots]
    return torch.stack([layer[slots] for layer in active])


def _valid(first: Tensor, first_count: int, second: Tensor, second_count: int) -> Tensor:
    in_first = (first >= 0) & (first < first_count)
    return in_first & (second >= 0) & (second < second_count)
