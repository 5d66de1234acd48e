"""The streams on which copies between a device and host memory run, beside the current one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from statecache.checkpoint.stream_order import event_behind

__all__ = ["CopyStreams", "Moment", "streams_on"]

# Target and source of each copy, of equal shape and type.
Copies = Sequence[tuple[Tensor, Tensor]]
# A point in what a stream has to do, reached or not, for streams to wait for.
Moment = Any


class CopyStreams(Protocol):
    """One stream for copies to the host and one for copies from it. No call waits."""

    def mark(self) -> Moment:
        """Return the moment when all is done that the current stream has to do now."""

    def hold(self, moments: Sequence[Moment]) -> None:
        """Let what the current stream gets to do from now on wait for `moments`."""

    def copy_out(self, copies: Copies, after: Sequence[Moment]) -> Moment:
        """Copy to the host after `after`; return the moment when it is done."""

    def copy_in(self, copies: Copies, after: Sequence[Moment]) -> Moment:
        """Copy from the host after `after`; return the moment when it is done."""


def streams_on(device: torch.device) -> CopyStreams:
    """Return the streams of a device; on other devices than CUDA all is done at once."""
    return _CudaStreams(device) if device.type == "cuda" else _AtOnce()


class _AtOnce:
    def mark(self) -> Moment:
        return None

    def hold(self, moments: Sequence[Moment]) -> None: ...

    def copy_out(self, copies: Copies, after: Sequence[Moment]) -> Moment:  # noqa: ARG002
        for target, source in copies:
            target.copy_(source)

    copy_in = copy_out


class _CudaStreams:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> Moment:
        return event_behind(self._device)

    def hold(self, moments: Sequence[Moment]) -> None:
        stream = torch.cuda.current_stream(self._device)
        for moment in moments:
            stream.wait_event(moment)

    def copy_out(self, copies: Copies, after: Sequence[Moment]) -> Moment:
        return self._copy(self._out, copies, after)

    def copy_in(self, copies: Copies, after: Sequence[Moment]) -> Moment:
        return self._copy(self._in, copies, after)

    @staticmethod
    def _copy(stream: torch.cuda.Stream, copies: Copies, after: Sequence[Moment]) -> Moment:
        for moment in after:
            stream.wait_event(moment)
        with torch.cuda.stream(stream):
            for target, source in copies:
                target.copy_(source, non_blocking=True)
        return stream.record_event()
