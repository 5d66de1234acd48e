"""What an engine's states look like, and what a checkpoint pool keeps of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from statecache.checkpoint_reference import scale_dtype

MODES = ("int8", "native")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class SideState:
    """A tensor copied bit for bit beside the temporal state, indexed by the same active slot.

    Layer-major `[layers, slots, ...]` has `slot_dim` 1, slot-major `[slots, ...]` has 0.
    """

    tensor: Tensor
    slot_dim: int = 1


@dataclass(frozen=True, slots=True)
class ActiveState:
    """Where an engine keeps the states of running requests.

    `temporal` is one tensor `[layers, slots, heads, d_v, d_k]` or a tensor
    `[slots, heads, d_v, d_k]` for each layer. `conv` are convolution states: layer-major beside a
    stacked `temporal`, slot-major beside one of many tensors. To estimate bytes, tensors on torch's
    meta device will do.
    """

    temporal: Tensor | Sequence[Tensor]
    conv: Sequence[Tensor] = ()
    side: Mapping[str, SideState] = field(default_factory=dict)

    def temporals(self) -> list[Tensor]:
        """Return the temporal tensors as a list, checked against each other."""
        tensors = [self.temporal] if isinstance(self.temporal, Tensor) else list(self.temporal)
        dims = 5 if isinstance(self.temporal, Tensor) else 4
        if not tensors:
            raise ValueError("an active state needs a temporal tensor")
        for tensor in tensors:
            if tensor.dim() != dims or tensor.dtype not in _DTYPES:
                raise ValueError(
                    f"temporal state {tuple(tensor.shape)} of {tensor.dtype}:"
                    f" need {dims} dimensions of float32, float16 or bfloat16"
                )
            if tensor.shape != tensors[0].shape or tensor.dtype != tensors[0].dtype:
                raise ValueError("temporal states differ between layers")
        return tensors

    def exact(self) -> dict[str, SideState]:
        """Return what is copied bit for bit, by name."""
        conv_dim = 1 if isinstance(self.temporal, Tensor) else 0
        rows = {f"conv.{i}": SideState(tensor, conv_dim) for i, tensor in enumerate(self.conv)}
        rows.update({f"side.{name}": state for name, state in self.side.items()})
        for name, state in rows.items():
            if state.slot_dim not in (0, 1) or state.tensor.dim() <= state.slot_dim:
                raise ValueError(f"{name}: slots must be dimension 0 or 1")
        return rows


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a pool: its shape for a number of slots, and its type."""

    name: str
    leading: tuple[int, ...]
    trailing: tuple[int, ...]
    dtype: torch.dtype

    def shape(self, slots: int) -> tuple[int, ...]:
        """Return the shape for `slots` slots."""
        return (*self.leading, slots, *self.trailing)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot, all layers."""
        return prod(self.leading) * prod(self.trailing) * self.dtype.itemsize


def pool_parts(active: ActiveState, mode: str) -> list[Part]:
    """Return the tensors that a pool for `active` consists of."""
    if mode not in MODES:
        raise ValueError(f"unknown mode '{mode}': use int8 or native")
    temporals = active.temporals()
    stacked = temporals[0].dim() == 5
    layers = temporals[0].shape[0] if stacked else len(temporals)
    heads, d_v, d_k = temporals[0].shape[-3:]
    dtype = temporals[0].dtype
    if mode == "int8":
        if d_v % 8 or d_k % 8:
            raise ValueError(f"d_v {d_v} and d_k {d_k} must be multiples of 8")
        parts = [
            Part("quantized", (layers,), (heads, d_v, d_k), torch.int8),
            Part("scale", (layers,), (heads, 1, d_k), scale_dtype(dtype)),
        ]
    else:
        parts = [Part("temporal", (layers,), (heads, d_v, d_k), dtype)]
    for name, state in active.exact().items():
        shape = row_view(state).shape
        leading, trailing = shape[: state.slot_dim], shape[state.slot_dim + 1 :]
        parts.append(Part(name, tuple(leading), tuple(trailing), state.tensor.dtype))
    return parts


def row_view(state: SideState) -> Tensor:
    """Return a view whose rows have no gaps, by reordering the dimensions within a row."""
    tensor, first = state.tensor, state.slot_dim + 1
    order = sorted(range(first, tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(*range(first), *order)


def estimate_bytes(
    active: ActiveState, slots: int, *, mode: str = "int8", reserve_slot_zero: bool = False
) -> int:
    """Return what a `CheckpointPool` of these arguments allocates, to the byte."""
    total = slots + int(reserve_slot_zero)
    return total * sum(part.bytes_per_slot for part in pool_parts(active, mode))


def signature(active: ActiveState) -> tuple[object, ...]:
    """Return what two active states must share to be copied through one pool."""
    temporals = active.temporals()
    exact = active.exact().items()
    return (
        len(temporals),
        tuple(temporals[0].shape[:-4]),
        tuple(temporals[0].shape[-3:]),
        temporals[0].dtype,
        str(temporals[0].device),
        tuple((name, _row_shape(state), state.tensor.dtype) for name, state in exact),
    )


def _row_shape(state: SideState) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape = row_view(state).shape
    return tuple(shape[: state.slot_dim]), tuple(shape[state.slot_dim + 1 :])
