"""What an engine's states look like, and what a checkpoint pool keeps of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import index

import torch
from torch import Tensor

from statecache.checkpoint.formats import format_named

_ALIGNMENT = 16  # the widest access of a kernel
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
    stacked `temporal`, slot-major beside one of many tensors. All tensors have the same slots and
    lie on one device. To estimate bytes, tensors on torch's meta device will do.

    What is given is copied, and read once: a pool works out the layout of an active state when it
    first sees it.
    """

    temporal: Tensor | Sequence[Tensor]
    conv: Sequence[Tensor] = ()
    side: Mapping[str, SideState] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.temporal, Tensor):
            object.__setattr__(self, "temporal", tuple(self.temporal))
        object.__setattr__(self, "conv", tuple(self.conv))
        object.__setattr__(self, "side", dict(self.side))

    def temporals(self) -> list[Tensor]:
        """Return the temporal tensors as a list, checked against each other."""
        tensors = [self.temporal] if isinstance(self.temporal, Tensor) else list(self.temporal)
        dims = 5 if isinstance(self.temporal, Tensor) else 4
        if not tensors:
            raise ValueError("an active state needs a temporal tensor")
        first = tensors[0]
        for tensor in tensors:
            if tensor.dim() != dims or tensor.dtype not in _DTYPES:
                raise ValueError(
                    f"temporal state {tuple(tensor.shape)} of {tensor.dtype}:"
                    f" need {dims} dimensions of float32, float16 or bfloat16"
                )
            if (
                tensor.shape != first.shape
                or tensor.stride() != first.stride()
                or tensor.dtype != first.dtype
                or tensor.device != first.device
            ):
                raise ValueError("temporal states differ between layers")
        if 0 in first.shape[: dims - 4] or 0 in first.shape[-3:]:
            raise ValueError(f"temporal state {tuple(first.shape)} is empty")
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


@dataclass(frozen=True, slots=True)
class Layout:
    """An active state that was checked as a whole: every copy of it will find what it needs.

    `exact` holds the tensors beside the temporal ones, which every format copies bit for bit;
    `rows` all tensors that this one does, `slot_dims` which dimension of each is the slots. Two
    layouts may be copied through one pool if their signatures are equal.
    """

    temporals: list[Tensor]
    exact: dict[str, SideState]
    rows: list[Tensor]
    slot_dims: list[int]
    slots: int
    signature: tuple[object, ...]

    @property
    def stacked(self) -> bool:
        """Whether one temporal tensor holds all layers."""
        return self.temporals[0].dim() == 5


def layout_of(active: ActiveState, mode: str) -> Layout:
    """Check all of `active`: `ValueError` says what a pool of the format `mode` cannot copy."""
    at_rest = format_named(mode)
    temporals = active.temporals()
    temporal = temporals[0]
    slots, heads, d_v, d_k = temporal.shape[-4:]
    if d_v % at_rest.side_multiple or d_k % at_rest.side_multiple:
        raise ValueError(f"d_v {d_v} and d_k {d_k} must be multiples of {at_rest.side_multiple}")
    if _has_gaps(temporal, -at_rest.dense_dims):
        what = "a head's matrix" if at_rest.dense_dims == 2 else "a slot's heads"
        raise ValueError(f"temporal state with strides {temporal.stride()}: {what} has gaps")
    rows: dict[str, SideState] = {}
    shapes: list[object] = []
    for name, state in active.exact().items():
        tensor, dim = state.tensor, state.slot_dim
        if tensor.shape[dim] != slots:
            raise ValueError(
                f"{name}: {tensor.shape[dim]} slots, but the temporal state has {slots}"
            )
        if tensor.device != temporal.device:
            raise ValueError(f"{name} is on {tensor.device}, not on {temporal.device}")
        order = _row_order(state)
        view = tensor.permute(*range(dim + 1), *order)
        if _has_gaps(view, dim + 1):
            raise ValueError(f"{name}: a row with strides {tensor.stride()[dim + 1 :]} has gaps")
        rows[name] = SideState(view, dim)
        # In which order the dimensions of a row lie: a row is copied as it lies.
        real = [d for d in order if tensor.shape[d] != 1]
        around = (tuple(tensor.shape[:dim]), tuple(tensor.shape[dim + 1 :]))
        shapes.append((name, *around, tuple(real), tensor.dtype))
    signature = (
        len(temporals),
        tuple(temporal.shape[:-4]),
        (heads, d_v, d_k),
        temporal.dtype,
        str(temporal.device),
        tuple(shapes),
    )
    tensors = [state.tensor for state in rows.values()]
    slot_dims = [state.slot_dim for state in rows.values()]
    if at_rest.exact:
        tensors += temporals
        slot_dims += [temporal.dim() - 4] * len(temporals)
    return Layout(temporals, rows, tensors, slot_dims, slots, signature)


def pool_parts(layout: Layout, mode: str) -> list[Part]:
    """Return the tensors that a pool for an active state of this layout consists of."""
    temporal = layout.temporals[0]
    layers = temporal.shape[0] if layout.stacked else len(layout.temporals)
    heads, d_v, d_k = temporal.shape[-3:]
    dtype = str(temporal.dtype).removeprefix("torch.")
    parts = [
        Part(part.name, (layers,), part.shape, getattr(torch, part.dtype))
        for part in format_named(mode).parts((heads, d_v, d_k), dtype)
    ]
    for name, state in layout.exact.items():
        shape = state.tensor.shape
        leading, trailing = shape[: state.slot_dim], shape[state.slot_dim + 1 :]
        parts.append(Part(name, tuple(leading), tuple(trailing), state.tensor.dtype))
    return parts


def estimate_bytes(
    active: ActiveState,
    slots: int,
    *,
    mode: str = "int8",
    reserve_slot_zero: bool = False,
    memory: str = "device",
) -> int:
    """Return what a `CheckpointPool` of these arguments allocates for its slots, to the byte."""
    total = slot_total(slots, reserve_slot_zero=reserve_slot_zero)
    return total * bytes_per_slot(pool_parts(layout_of(active, mode), mode), memory)


def bytes_per_slot(parts: Sequence[Part], memory: str) -> int:
    """Return the bytes of one slot; in host memory parts are aligned for the kernels."""
    sizes = [part.bytes_per_slot for part in parts]
    return sum(map(aligned, sizes)) if memory == "host" else sum(sizes)


def aligned(count: int) -> int:
    """Return how many bytes a part of a slot takes in host memory."""
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def slot_total(slots: int, *, reserve_slot_zero: bool) -> int:
    """Return the slots a pool of `slots` slots allocates; `TypeError` if that is no integer."""
    if index(slots) < 1:
        raise ValueError(f"a checkpoint pool needs at least 1 slot, not {slots}")
    return index(slots) + int(reserve_slot_zero)


def _row_order(state: SideState) -> list[int]:
    """Return the dimensions of a row from the outermost in memory on; those of size 1 last."""
    shape, stride = state.tensor.shape, state.tensor.stride()
    dims = range(state.slot_dim + 1, state.tensor.dim())
    return sorted(dims, key=lambda d: (shape[d] == 1, -stride[d]))


def _has_gaps(tensor: Tensor, first: int) -> bool:
    """Whether the dimensions from `first` on are not one block of memory, in that order."""
    expected = 1
    shape, stride = tensor.shape[first:], tensor.stride()[first:]
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return True
        expected *= size
    return False
