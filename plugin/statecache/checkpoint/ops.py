"""The copies between an active pool and an int8 checkpoint pool: native where there is a kernel.

Arguments of the three copies, native and plain alike:

- `active`: the temporal states, one tensor `[layers, slots, heads, d_v, d_k]` or a tensor
  `[slots, heads, d_v, d_k]` for each layer; float32, float16 or bfloat16. A head's matrix lies
  without gaps, the other strides are free; d_v and d_k are multiples of 8.
- `quantized`: int8 `[layers, slots, heads, d_v, d_k]`; `scale`: `[layers, slots, heads, 1, d_k]`,
  bfloat16 for bfloat16 states, else float32.
- slots: int64 vectors of one length on the states' device. A pair is skipped, so not written, when
  either slot is negative or beyond its pool.
- `report`: an int32 vector of that length, zero before. A store sets `STORED` for each pair it did
  not skip, none if there are no layers or heads, and `NON_FINITE` where the state holds NaN or
  Inf, or is so large that it would come back as Inf; such a slot then holds nothing of use. A move
  sets `STORED` alone, and takes None where nobody asks.
- rows: tensors of any types and shapes, all of the same slots, in one call. Their slots are
  dimension 0, or dimension 1 behind the layers, as `slot_dims` says for each tensor.

A store or a load is one launch for up to 128 layers, a move one for up to 192 layers of all its
tensors together, of up to 16 lengths and distances of rows; beyond that, one more for each such
number.

No native copy allocates or synchronises. On CUDA they need compute capability 8.0 and run on
torch's current stream. Graphs may capture them once they have run: a kernel's first launch loads
it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from statecache.checkpoint import reference
from statecache.checkpoint.reference import NON_FINITE, STORED

__all__ = [
    "NON_FINITE",
    "STORED",
    "CheckpointOps",
    "describe_failure",
    "is_launch_failure",
    "native_ops",
    "ops_for",
    "plain_ops",
]

_OLDEST_CAPABILITY = (8, 0)
_AGAIN = (
    "Install it again where torch is: pip install --force-reinstall --no-deps --no-cache-dir"
    " --no-build-isolation statecache; a torch elsewhere is named by"
    " -C cmake.define.STATECACHE_TORCH_DIR=FOLDER"
)
_log = logging.getLogger("statecache.checkpoint")

StoreCopy = Callable[[Sequence[Tensor], Tensor, Tensor, Tensor, Tensor, Tensor], None]
LoadCopy = Callable[[Tensor, Tensor, Sequence[Tensor], Tensor, Tensor], None]
MoveCopy = Callable[
    [Sequence[Tensor], Sequence[Tensor], Tensor, Tensor, Sequence[int], Tensor | None], None
]


@dataclass(frozen=True, slots=True)
class CheckpointOps:
    """One way to copy.

    `store(active, quantized, scale, report, active_slots, slots)` quantises active states;
    `load(quantized, scale, active, slots, active_slots)` brings them back;
    `move(sources, targets, source_slots, target_slots, slot_dims, report)` copies rows bit for bit.
    """

    name: str
    store: StoreCopy
    load: LoadCopy
    move: MoveCopy


@cache
def plain_ops() -> CheckpointOps:
    """Return the copies made of plain torch operators."""
    return CheckpointOps("torch", reference.store, reference.load, reference.move)


@cache
def native_ops() -> CheckpointOps:
    """Return the native copies; `ImportError` says why there are none."""
    _operators()
    ops = torch.ops.statecache
    return CheckpointOps("native", ops.checkpoint_store, ops.checkpoint_load, ops.checkpoint_move)


@cache
def ops_for(device: str) -> CheckpointOps:
    """Return the fastest copies for a device, and log once if those are the plain ones."""
    try:
        with_cuda = _operators()
    except ImportError as error:
        _log.warning("statecache: %s; using plain torch operators, which are far slower", error)
        return plain_ops()
    kind = torch.device(device).type
    why = f"it was built without checkpoint kernels for {kind}"
    if kind == "cpu":
        return native_ops()
    if kind == "cuda" and with_cuda:
        capability = torch.cuda.get_device_capability(device)
        if capability >= _OLDEST_CAPABILITY:
            return native_ops()
        why = f"its checkpoint kernels need compute capability 8.0, not {capability}"
    _log.warning("statecache: %s; using plain torch operators, which are far slower", why)
    return plain_ops()


def is_launch_failure(error: RuntimeError) -> bool:
    """Whether a native copy raised this because its kernel could not be launched, and did not run.

    No kernel for this GPU in the build, a driver older than the CUDA it was built with, and the
    like.
    """
    return "statecache: launch failed" in str(error)


def describe_failure(device: torch.device, error: RuntimeError) -> str:
    """Return one line: which copies do not work on `device`, why, and what is done."""
    reason = str(error).partition("\n")[0].removeprefix("statecache: ")
    where = str(device)
    if device.type == "cuda":
        from statecache import _checkpoint_ops

        major, minor = torch.cuda.get_device_capability(device)
        built = _checkpoint_ops.cuda_architectures
        where += f" (compute capability {major}.{minor}, kernels built for {built})"
    return (
        f"the native checkpoint copies do not work on {where}: {reason}; using plain torch"
        " operators, which are far slower"
    )


@cache
def _operators() -> bool:
    """Register the operators; return whether they have CUDA kernels."""
    try:
        from statecache import _checkpoint_ops
    except ImportError as error:
        raise ImportError(_why_not(error)) from error
    for name in ("checkpoint_store", "checkpoint_load", "checkpoint_move"):
        torch.library.register_fake(f"statecache::{name}", _nothing_to_infer)
    return bool(_checkpoint_ops.with_cuda)


def _why_not(error: ImportError) -> str:
    if find_spec("statecache._checkpoint_ops") is None:
        return (
            "statecache was installed without its checkpoint copies: no torch from 2.11 on was"
            f" found when it was built, or STATECACHE_OPS=OFF was set. {_AGAIN}"
        )
    return (
        f"statecache's checkpoint copies are installed but do not load ({error}); they need torch"
        f" from the one they were built for on, this is {torch.__version__}. {_AGAIN}"
    )


def _nothing_to_infer(*arguments: object) -> None:
    """Stand in for a copy while torch traces: copies only change their arguments.

    Torch also comes here with real tensors when one of them is on the meta device.
    """
    devices: set[torch.device] = set()
    for argument in arguments:
        tensors = argument if isinstance(argument, (list, tuple)) else [argument]
        devices.update(tensor.device for tensor in tensors if isinstance(tensor, Tensor))
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise RuntimeError(f"statecache: the tensors of one copy lie on {names}")
