"""The launches that move states between an engine's tensors and the tensors of one pool."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from statecache.checkpoint.formats import Format, TemporalCopy
from statecache.checkpoint.layout import Layout
from statecache.checkpoint.ops import (
    CheckpointOps,
    describe_failure,
    is_launch_failure,
    plain_ops,
)

__all__ = ["PoolLaunches", "upload", "upload_pairs"]

_log = logging.getLogger("statecache.checkpoint")


class PoolLaunches:
    """Copies of all layers of all listed slots of one pool, one launch a kind.

    One for every row that is kept bit for bit, of all tensors and layers; one more for temporal
    states in a format that is not exact. `kept` are the pool's tensors by name, for active states
    of which `layout` is one; sources, targets and report are as `statecache.checkpoint.ops` says.

    A kernel that cannot be launched has not run. Unless `falls_back` is False, the copy is then
    made by plain torch operators, as all later ones; `failures` counts it.
    """

    def __init__(
        self,
        at_rest: Format,
        ops: CheckpointOps,
        layout: Layout,
        kept: Mapping[str, Tensor],
        *,
        falls_back: bool = True,
    ) -> None:
        self.ops = ops
        self.failures = 0
        self._falls_back = falls_back
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
        self._run(lambda: self._store(layout, sources, targets, report), targets.device)

    def load(self, layout: Layout, sources: Tensor, targets: Tensor) -> None:
        """Copy states of the pool into active ones."""
        self._run(lambda: self._load(layout, sources, targets), targets.device)

    def _run(self, copy: Callable[[], None], device: torch.device) -> None:
        try:
            copy()
        except RuntimeError as error:
            if not (self._falls_back and is_launch_failure(error)):
                raise
            _log.error("statecache: %s", describe_failure(device, error))
            self.failures += 1
            self.ops = plain_ops()
            copy()

    def _store(
        self, layout: Layout, sources: Tensor, targets: Tensor, report: Tensor | None
    ) -> None:
        quantize = self._format.store
        if layout.rows:
            asked = report if quantize is None else None
            self.ops.move(layout.rows, self._rows, sources, targets, layout.slot_dims, asked)
        if quantize is not None and report is not None:
            quantize(self._temporal(layout, sources, targets), report)

    def _load(self, layout: Layout, sources: Tensor, targets: Tensor) -> None:
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
    listed = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
    whole = listed.to(device, non_blocking=True)
    *vectors, rest = torch.split(whole, [*map(len, lists), (zeros + 1) // 2])
    return vectors, rest.view(torch.int32)[:zeros]


def upload_pairs(
    slots: Tensor | list[int], active_slots: Tensor | list[int], zeros: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return slots, active slots and so many zeros on the device; what is there stays."""
    both = (slots, active_slots)
    lists = [each for each in both if not isinstance(each, Tensor)]
    uploaded, cleared = upload(lists, zeros, device) if lists else ([], None)
    ours, theirs = (
        each.to(device, torch.int64).contiguous() if isinstance(each, Tensor) else uploaded.pop(0)
        for each in both
    )
    return ours, theirs, cleared
