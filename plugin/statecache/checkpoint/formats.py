"""Every format a checkpoint may have at rest: one row of `FORMATS` each.

A format says what a temporal state becomes in the pool; convolution and side states are kept bit
for bit in every format. Importing this loads no torch: the settings and `statecache plan` read it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from statecache.checkpoint.ops import CheckpointOps

__all__ = ["DTYPE_BYTES", "FORMATS", "Format", "TemporalCopy", "TemporalPart", "format_named"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}

Shape = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class TemporalPart:
    """One tensor that the temporal state of a layer becomes: `shape` is heads, rows, columns."""

    name: str
    shape: Shape
    dtype: str


@dataclass(frozen=True, slots=True)
class TemporalCopy:
    """A copy of temporal states between an engine's tensors and a pool's, all layers.

    `temporals` are the engine's, one `[layers, slots, heads, d_v, d_k]` or a
    `[slots, heads, d_v, d_k]` for each layer; `kept` are the pool's tensors by name. State
    `sources[i]` goes to `targets[i]`; which of the two are the engine's slots depends on the way.
    """

    ops: CheckpointOps
    temporals: Sequence[Tensor]
    kept: Mapping[str, Tensor]
    sources: Tensor
    targets: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How temporal states lie in a checkpoint pool.

    `parts(shape, dtype)` names the tensors for a layer's heads, d_v, d_k and the type of its
    state. `store(copy, report)` and `load(copy)` move temporal states of all layers; the report is
    as `statecache.checkpoint.ops` says. Both are None in a format that keeps temporal states bit
    for bit, in one tensor `temporal`: they go the way of all exact rows, and none is refused.

    The constraints: d_v and d_k are multiples of `side_multiple`, and the last `dense_dims` of the
    dimensions heads, d_v, d_k lie in memory without gaps.
    """

    name: str
    summary: str
    side_multiple: int
    dense_dims: int
    parts: Callable[[Shape, str], tuple[TemporalPart, ...]]
    store: Callable[[TemporalCopy, Tensor], None] | None = None
    load: Callable[[TemporalCopy], None] | None = None

    @property
    def exact(self) -> bool:
        """Whether temporal states come back bit for bit."""
        return self.store is None

    def bytes_per_layer(self, shape: Shape, dtype: str) -> int:
        """Return the bytes that the temporal state of one layer takes in a slot."""
        return sum(prod(part.shape) * DTYPE_BYTES[part.dtype] for part in self.parts(shape, dtype))


def _native_parts(shape: Shape, dtype: str) -> tuple[TemporalPart, ...]:
    return (TemporalPart("temporal", shape, dtype),)


def _int8_parts(shape: Shape, dtype: str) -> tuple[TemporalPart, ...]:
    heads, _, d_k = shape
    # A float16 scale would underflow.
    scale = "bfloat16" if dtype == "bfloat16" else "float32"
    return (
        TemporalPart("quantized", shape, "int8"),
        TemporalPart("scale", (heads, 1, d_k), scale),
    )


def _int8_store(copy: TemporalCopy, report: Tensor) -> None:
    quantized, scale = copy.kept["quantized"], copy.kept["scale"]
    copy.ops.store(copy.temporals, quantized, scale, report, copy.sources, copy.targets)


def _int8_load(copy: TemporalCopy) -> None:
    quantized, scale = copy.kept["quantized"], copy.kept["scale"]
    copy.ops.load(quantized, scale, copy.temporals, copy.sources, copy.targets)


_ROWS = (
    Format(
        name="native",
        summary="exact copies",
        side_multiple=1,
        dense_dims=3,
        parts=_native_parts,
    ),
    Format(
        name="int8",
        summary="one scale a head and key channel, about half the bytes of bfloat16",
        side_multiple=8,
        dense_dims=2,
        parts=_int8_parts,
        store=_int8_store,
        load=_int8_load,
    ),
)
FORMATS: Mapping[str, Format] = {row.name: row for row in _ROWS}


def format_named(name: str) -> Format:
    """Return the format of this name; `ValueError` lists the names there are."""
    try:
        return FORMATS[name]
    except KeyError:
        raise ValueError(
            f"unknown checkpoint format '{name}': use {' or '.join(FORMATS)}"
        ) from None
