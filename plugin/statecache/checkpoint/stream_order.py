"""The order of the copies of one pool, and values that come to the host behind them."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["HostCopy", "StreamOrdering", "event_behind", "is_over"]


def event_behind(device: torch.device) -> torch.cuda.Event | None:
    """Return what happens once the work of the current stream is done; None where it is."""
    if device.type != "cuda":
        return None
    event: torch.cuda.Event = torch.cuda.current_stream(device).record_event()
    return event


def is_over(event: torch.cuda.Event | None) -> bool:
    """Whether what an event of `event_behind` stands for is done; the host does not wait."""
    return event is None or bool(event.query())  # type: ignore[no-untyped-call]


class HostCopy:
    """The values of a tensor, on their way to pinned memory behind what computes them."""

    def __init__(self, tensor: Tensor) -> None:
        self._values = tensor.to("cpu", non_blocking=True)
        self._done = event_behind(tensor.device)

    def is_ready(self) -> bool:
        """Whether the values can be read without waiting."""
        return is_over(self._done)

    def read(self) -> Tensor:
        """Return the values, on the host; waits for them unless they are ready."""
        if self._done is not None and not self.is_ready():
            self._done.synchronize()
        return self._values


class StreamOrdering:
    """Makes each copy of a pool wait, on the device, for the copy before it.

    On devices other than CUDA copies are done when a call returns, and nothing happens here.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_cuda = device.type == "cuda"
        self._last: tuple[torch.cuda.Stream, torch.cuda.Event] | None = None

    def begin(self) -> None:
        """Order the current stream after the last copy; `RuntimeError` while a graph captures."""
        if not self._on_cuda:
            return
        with torch.cuda.device(self._device):
            capturing = torch.cuda.is_current_stream_capturing()
        if capturing:
            raise RuntimeError(
                "a checkpoint pool cannot be used while a CUDA graph is captured: it keeps its"
                " slots on the host; capture the operators of statecache.checkpoint.ops instead"
            )
        stream = torch.cuda.current_stream(self._device)
        if self._last is not None and self._last[0] != stream:
            stream.wait_event(self._last[1])

    def end(self) -> torch.cuda.Event | None:
        """Return what happens when the copies since `begin` are done; None if they are."""
        event = event_behind(self._device)
        if self._on_cuda and event is not None:
            self._last = (torch.cuda.current_stream(self._device), event)
        return event
