"""The launches that move states between an engine's tensors and the tensors of one pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from statecache.checkpoint.formats import Format, TemporalCopy
from statecache.checkpoint.layout import Layout
from statecache.checkpoint.ops import CheckpointOps

__all__ = ["PoolLaunches", "upload"]


class PoolLaunches:
    """Copies of all layers of all listed slots of one pool, one launch a kind.

    One for every row that is kept bit for bit, of all tensors and layers; one more for temporal
    states in a format that is not exact. `kept` are the pool's tensors by name, for active states
    of which `layout` is one; sources, targets and report are as `statecache.checkpoint.ops` says.
    """

    def __init__(
        self, at_rest: Format, ops: CheckpointOps, layout: Layout, kept: Mapping[str, Tensor]
    ) -> None:
        self.ops = ops
        self._format = at_rest
        self._kept = kept
        self._rows = [kept[name] for name in layout.exact]
        if at_rest.exact:
            temporal = kept["temporal"]
            self._rows += [temporal] if layout.stacked else temporal.unbind()

    def store(
        self, layout: Layout, sources: Tensor, targets: Tensor, report: Tensor | None
    ) -> None:
        """Copy active states into the pool; a format that is not exact needs the report."""
        quantize = self._format.store
        if layout.rows:
            asked = report if quantize is None else None
            self.ops.move(layout.rows, self._rows, sources, targets, layout.slot_dims, asked)
        if quantize is not None and report is not None:
            quantize(self._temporal(layout, sources, targets), report)

    def load(self, layout: Layout, sources: Tensor, targets: Tensor) -> None:
        """Copy states of the pool into active ones."""
        if layout.rows:
            self.ops.move(self._rows, layout.rows, sources, targets, layout.slot_dims, None)
        dequantize = self._format.load
        if dequantize is not None:
            dequantize(self._temporal(layout, sources, targets))

    def _temporal(self, layout: Layout, sources: Tensor, targets: Tensor) -> TemporalCopy:
        return TemporalCopy(self.ops, layout.temporals, self._kept, sources, targets)


def upload(
    lists: Sequence[Sequence[int]], zeros: int, device: torch.device
) -> tuple[list[Tensor], Tensor]:
    """Return int64 vectors of lists of one length, and an int32 vector of so many zeros.

    All in one upload to `device`, which the host does not wait for where that is CUDA.
    """
    numbers = [*chain(*lists), *[0] * ((zeros + 1) // 2)]
    if device.type == "cuda":
        pinned = torch.tensor(numbers, dtype=torch.int64, pin_memory=True)
        whole = pinned.to(device, non_blocking=True)
    else:
        whole = torch.tensor(numbers, dtype=torch.int64, device=device)
    *vectors, rest = torch.split(whole, [*map(len, lists), (zeros + 1) // 2])
    return vectors, rest.view(torch.int32)[:zeros]
