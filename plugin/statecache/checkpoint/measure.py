"""The bytes of a state added up, and how far a state at rest is from what it was made of.

Plain torch operators on any device: they run for a small share of states.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from statecache.checkpoint.formats import Format, TemporalCopy
from statecache.checkpoint.layout import Layout
from statecache.checkpoint.ops import CheckpointOps

__all__ = ["checksum", "relative_errors"]

_WORD_BYTES = 8


def checksum(rows: Iterable[Tensor]) -> Tensor:
    """Return the sum of all words of `rows`, each times its odd place, modulo 2^64, as int64.

    The words are the rows' bytes, each row filled up with zeros to 8 bytes, little end first;
    places are 1, 3, 5 and so on through all rows. An odd factor loses nothing modulo 2^64: a change
    within one word always changes the sum.
    """
    total: Tensor | None = None
    place = 0
    for row in rows:
        data = row.reshape(-1).view(torch.uint8)
        missing = -data.numel() % _WORD_BYTES
        if missing:
            data = torch.cat([data, data.new_zeros(missing)])
        elif data.storage_offset() % _WORD_BYTES:
            data = data.clone()
        words = data.view(torch.int64)
        count = words.numel()
        factors = torch.arange(place, place + count, dtype=torch.int64, device=row.device)
        part = words.mul(factors.mul_(2).add_(1)).sum()
        total = part if total is None else total + part
        place += count
    if total is None:
        raise ValueError("there is nothing to add up")
    return total


def relative_errors(
    at_rest: Format,
    ops: CheckpointOps,
    layout: Layout,
    kept: Mapping[str, Tensor],
    active_slot: Tensor,
    slot: Tensor,
) -> Tensor:
    """Return how far the state in a slot is from the active one it was made from, for each layer.

    Both slots are int64 vectors of length 1. The norm of the difference by the norm of the active
    state, float32 `[layers]`; 0 for a state of zeros.
    """
    temporals = layout.temporals
    if layout.stacked:
        active = temporals[0].index_select(1, active_slot)
    else:
        active = torch.stack([tensor.index_select(0, active_slot) for tensor in temporals])
    back = torch.empty_like(active, memory_format=torch.contiguous_format)
    zero = torch.zeros_like(slot)
    if at_rest.load is None:
        raise ValueError(f"a state in the format '{at_rest.name}' is exact")
    at_rest.load(TemporalCopy(ops, [back], kept, slot, zero))
    wide = active.to(torch.float32).flatten(1)
    error = (back.to(torch.float32).flatten(1) - wide).norm(dim=1)
    norm = wide.norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
    relative: Tensor = error / norm
    return relative
