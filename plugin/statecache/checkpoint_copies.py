"""The copies between an active pool and an int8 checkpoint pool: native where there is a kernel.

Arguments of the three copies, native and plain alike:

- `active`: the temporal states, one tensor `[layers, slots, heads, d_v, d_k]` or a tensor
  `[slots, heads, d_v, d_k]` for each layer; float32, float16 or bfloat16. A head's matrix lies
  without gaps, the other strides are free; d_v and d_k are multiples of 8.
- `quantized`: int8 `[layers, slots, heads, d_v, d_k]`; `scale`: `[layers, slots, heads, 1, d_k]`,
  bfloat16 for bfloat16 states, else float32.
- slots: int64 vectors of one length on the states' device. A pair with a negative slot is skipped.
  A slot beyond its pool is skipped too on CUDA, and an error on the CPU.
- `report`: an int32 vector of that length, zero before. A store sets `STORED` for each pair it did
  not skip, and `NON_FINITE` where the state holds NaN or Inf, or is so large that it would come
  back as Inf; what such a slot then holds is of no use.

No copy allocates or synchronises. On CUDA they run on torch's current stream, and graphs may
capture them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from statecache import checkpoint_reference as reference
from statecache.checkpoint_reference import NON_FINITE, STORED

__all__ = ["NON_FINITE", "STORED", "Copies", "copies_for", "native_copies", "plain_copies"]

_log = logging.getLogger("statecache.checkpoint")

StoreCopy = Callable[[Sequence[Tensor], Tensor, Tensor, Tensor, Tensor, Tensor], None]
LoadCopy = Callable[[Tensor, Tensor, Sequence[Tensor], Tensor, Tensor], None]
MoveCopy = Callable[[Tensor, Tensor, Tensor, Tensor, int], None]


@dataclass(frozen=True, slots=True)
class Copies:
    """One way to copy.

    `store(active, quantized, scale, report, active_slots, slots)` quantises active states;
    `load(quantized, scale, active, slots, active_slots)` brings them back;
    `move(source, target, source_slots, target_slots, slot_dim)` copies rows of any type bit for
    bit; slots are dimension 0, or dimension 1 behind the layers.
    """

    name: str
    store: StoreCopy
    load: LoadCopy
    move: MoveCopy


@cache
def plain_copies() -> Copies:
    """Return the copies made of plain torch operators."""
    return Copies("torch", reference.store, reference.load, reference.move)


@cache
def native_copies() -> Copies:
    """Return the native copies; `ImportError` says why there are none."""
    _operators()
    ops = torch.ops.statecache
    return Copies("native", ops.checkpoint_store, ops.checkpoint_load, ops.checkpoint_move)


@cache
def copies_for(device_type: str) -> Copies:
    """Return the fastest copies for a kind of device, and log once if those are the plain ones."""
    try:
        with_cuda = _operators()
    except ImportError as error:
        _log.warning("%s; using plain torch operators, which are far slower", error)
        return plain_copies()
    if device_type == "cpu" or (device_type == "cuda" and with_cuda):
        return native_copies()
    _log.warning(
        "statecache was built without checkpoint kernels for %s; using plain torch operators,"
        " which are far slower",
        device_type,
    )
    return plain_copies()


@cache
def _operators() -> bool:
    """Register the operators; return whether they have CUDA kernels."""
    try:
        from statecache import _checkpoint_ops
    except ImportError as error:
        raise ImportError(
            "statecache was installed without its checkpoint copies: no torch was found when it"
            " was built. Install it again where torch is:"
            f" pip install --force-reinstall --no-deps --no-cache-dir statecache ({error})"
        ) from error
    for name in ("checkpoint_store", "checkpoint_load", "checkpoint_move"):
        torch.library.register_fake(f"statecache::{name}", _nothing_to_infer)
    return bool(_checkpoint_ops.with_cuda)


def _nothing_to_infer(*_: object) -> None:
    """Stand in for a copy while torch traces: copies only change their arguments."""
