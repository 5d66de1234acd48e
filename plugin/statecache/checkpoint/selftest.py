"""Whether copies work on a device at all: one small state stored there and loaded again."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from statecache.checkpoint.formats import format_named
from statecache.checkpoint.launches import PoolLaunches, upload
from statecache.checkpoint.layout import ActiveState, layout_of, pool_parts
from statecache.checkpoint.ops import CheckpointOps, describe_failure, plain_ops

__all__ = ["CopiesDoNotWorkError", "check_copies", "working_ops"]

_log = logging.getLogger("statecache.checkpoint")


class CopiesDoNotWorkError(ValueError):
    """No way to copy works on this device."""


def working_ops(
    ops: CheckpointOps, device: torch.device, mode: str, dtype: torch.dtype, matrix: tuple[int, int]
) -> CheckpointOps:
    """Return `ops` if they work on `device`, else the plain ones with a warning.

    `CopiesDoNotWorkError` if those do not work either.
    """
    try:
        check_copies(ops, device, mode, dtype, matrix)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if ops is plain_ops():
            reason = str(error).partition("\n")[0]
            raise CopiesDoNotWorkError(f"nothing can be copied on {device}: {reason}") from error
        _log.warning("statecache: %s", describe_failure(device, error))
        return working_ops(plain_ops(), device, mode, dtype, matrix)
    return ops


def check_copies(
    ops: CheckpointOps,
    device: torch.device,
    mode: str,
    dtype: torch.dtype,
    matrix: tuple[int, int],
) -> None:
    """Store one slot of a state of one head, d_v x d_k, on `device` and load it into another.

    Waits for the device. `RuntimeError` says what failed, or that the bytes are not those that
    plain torch operators on the CPU leave behind.
    """
    ours = _round_trip(ops, device, mode, dtype, matrix)
    expected = _round_trip(plain_ops(), torch.device("cpu"), mode, dtype, matrix)
    if not all(map(torch.equal, ours, expected)):
        raise RuntimeError("a state that was stored does not come back as it should")


def _round_trip(
    ops: CheckpointOps,
    device: torch.device,
    mode: str,
    dtype: torch.dtype,
    matrix: tuple[int, int],
) -> list[Tensor]:
    """Return, on the CPU, all there is after one store and load."""
    d_v, d_k = matrix
    # Every value is exact in all types; columns have largest magnitudes of their own.
    numbers = torch.arange(2 * d_v * d_k) * 37 % 251 - 125
    temporal = (numbers.reshape(1, 2, 1, d_v, d_k) / 16).to(dtype).to(device)
    row = torch.arange(14, dtype=torch.uint8).reshape(1, 2, 7).to(device)
    active = ActiveState(temporal, [row])
    layout = layout_of(active, mode)
    kept = {
        part.name: torch.zeros(part.shape(1), dtype=part.dtype, device=device)
        for part in pool_parts(layout, mode)
    }
    launches = PoolLaunches(format_named(mode), ops, layout, kept, falls_back=False)
    (first, second), report = upload([[0], [1]], 1, device)
    launches.store(layout, second, first, report)
    launches.load(layout, first, first)
    return [tensor.cpu() for tensor in (temporal, row, report, *kept.values())]
