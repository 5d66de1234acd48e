"""The order of the copies of one pool: on CUDA that of the calls, whatever the streams."""

from __future__ import annotations

import torch

__all__ = ["StreamOrdering"]


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
        if not self._on_cuda:
            return None
        stream = torch.cuda.current_stream(self._device)
        event: torch.cuda.Event = stream.record_event()
        self._last = (stream, event)
        return event
