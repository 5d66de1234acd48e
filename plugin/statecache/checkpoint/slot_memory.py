"""Where the slots of a pool lie: on the device, or in host memory behind a ring on the device."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from statecache.checkpoint.copy_streams import CopyStreams, Moment, streams_on
from statecache.checkpoint.layout import Part, aligned, bytes_per_slot

__all__ = ["RING_ROWS", "DeviceSlots", "HostSlots", "SlotMemory", "turn_on"]

RING_ROWS = 8
# Slots or rows by their numbers; those of a tensor are not looked into.
Slots = list[int] | Tensor


class SlotMemory(Protocol):
    """What a pool asks of the memory of its slots.

    A kernel reads and writes rows of `tensors`, by the name of their part. Slot `slots[i]` of a
    copy is worked on in row `rows(slots)[i]`; slots come in `batches`, which are worked on one
    after the other. An entry below 0 is skipped and stays as it is.
    """

    tensors: dict[str, Tensor]
    slot_bytes: int  # of all slots
    ring_bytes: int  # on the device beside them

    def rows(self, slots: Any) -> Any:
        """Return the row in which each slot is worked on."""

    def batches(self, count: int) -> Iterator[slice]:
        """Return the parts of a copy of so many slots that are made at once."""

    def write(self, rows: Slots) -> None:
        """Let the current stream write rows from here on."""

    def send(self, slots: Slots, rows: Slots) -> None:
        """Keep in slots what the current stream has written into rows."""

    def fetch(self, slots: Slots, rows: Slots) -> None:
        """Let the current stream find in rows, from here on, what slots hold."""

    def release(self, rows: Slots) -> None:
        """Say that the current stream has read rows which it fetched."""


class DeviceSlots:
    """Slots on the device: each is its own row."""

    ring_bytes = 0

    def __init__(self, parts: Sequence[Part], slots: int, device: torch.device) -> None:
        self.tensors = {
            part.name: torch.zeros(part.shape(slots), dtype=part.dtype, device=device)
            for part in parts
        }
        self.slot_bytes = sum(map(_storage_bytes, self.tensors.values()))

    def rows(self, slots: Any) -> Any:
        """Return the slots themselves."""
        return slots

    def batches(self, count: int) -> Iterator[slice]:
        """Return one part."""
        yield slice(0, count)

    def write(self, rows: Slots) -> None:
        """Do nothing: a slot is a row."""

    def send(self, slots: Slots, rows: Slots) -> None:
        """Do nothing: a slot is a row."""

    def fetch(self, slots: Slots, rows: Slots) -> None:
        """Do nothing: a slot is a row."""

    def release(self, rows: Slots) -> None:
        """Do nothing: a slot is a row."""


class HostSlots:
    """Slots in pinned host memory, each copied whole from or to a row of a ring on the device.

    Copies to the host and from it run on streams of their own; the host waits for none. A row is
    used again when what used it last is over; a slot is copied to the device when its copy from
    there has ended, and from there when a kernel has written its row, which is after all kernels
    that read the slot before.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        slots: int,
        device: torch.device,
        *,
        ring: int = RING_ROWS,
        streams: CopyStreams | None = None,
    ) -> None:
        if ring < 1:
            raise ValueError(f"a ring needs at least 1 row, not {ring}")
        bytes_per_row = bytes_per_slot(parts, "host")
        self._ring_rows = min(ring, slots)
        self._host = _pinned(slots, bytes_per_row, device)
        size = (self._ring_rows, bytes_per_row)
        self._ring = torch.zeros(size, dtype=torch.uint8, device=device)
        self.tensors = dict(_views(parts, self._ring))
        self.slot_bytes, self.ring_bytes = _storage_bytes(self._host), _storage_bytes(self._ring)
        self._streams = streams or streams_on(device)
        self._next = 0
        # What has to be over before a row is used again, and before a slot is read.
        self._row_busy: dict[int, Moment] = {}
        self._slot_written: dict[int, Moment] = {}

    def rows(self, slots: Any) -> Any:
        """Return the rows of the ring that come next; entries below 0 take one, too.

        `ValueError` for a tensor, whose values the host does not know.
        """
        if isinstance(slots, Tensor):
            raise ValueError("slots in host memory are those of a list, not of a tensor")
        first, self._next = self._next, (self._next + len(slots)) % self._ring_rows
        return [-1 if slot < 0 else (first + at) % self._ring_rows for at, slot in enumerate(slots)]

    def batches(self, count: int) -> Iterator[slice]:
        """Return parts of as many slots as the ring has rows."""
        for begin in range(0, count, self._ring_rows):
            yield slice(begin, min(begin + self._ring_rows, count))

    def write(self, rows: Slots) -> None:
        """Have the current stream wait for what is still done with these rows."""
        busy = [self._row_busy[row] for row in rows if row in self._row_busy]
        self._streams.hold([*dict.fromkeys(busy)])

    def send(self, slots: Slots, rows: Slots) -> None:
        """Copy rows to the host when the current stream has written them."""
        pairs = _pairs(slots, rows)
        if not pairs:
            return
        written = self._streams.mark()
        self._row_busy.update((row, written) for _, row in pairs)
        copies = [(self._host[slot], self._ring[row]) for slot, row in pairs]
        moment = self._streams.copy_out(copies, [written])
        self._row_busy.update((row, moment) for _, row in pairs)
        self._slot_written.update((slot, moment) for slot, _ in pairs)

    def fetch(self, slots: Slots, rows: Slots) -> None:
        """Copy slots from the host, and have the current stream wait for that."""
        pairs = _pairs(slots, rows)
        if not pairs:
            return
        needed = [self._row_busy[row] for _, row in pairs if row in self._row_busy]
        needed += [self._slot_written[slot] for slot, _ in pairs if slot in self._slot_written]
        moment = self._streams.copy_in(
            [(self._ring[row], self._host[slot]) for slot, row in pairs], [*dict.fromkeys(needed)]
        )
        self._streams.hold([moment])
        self._row_busy.update((row, moment) for _, row in pairs)

    def release(self, rows: Slots) -> None:
        """Keep rows for what the current stream has to do now."""
        moment = self._streams.mark()
        self._row_busy.update((row, moment) for row in rows if row >= 0)


@contextmanager
def turn_on(memory: SlotMemory, rows: Slots) -> Iterator[None]:
    """Keep rows for what was launched on them, should not all of it be."""
    try:
        yield
    except BaseException:
        memory.release(rows)
        raise


def _storage_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _pairs(slots: Iterable[Any], rows: Iterable[Any]) -> list[tuple[int, int]]:
    return [(slot, row) for slot, row in zip(slots, rows, strict=True) if slot >= 0]


def _views(parts: Sequence[Part], ring: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Return each part of all rows, as the pool's own tensors are shaped."""
    begin = 0
    for part in parts:
        size = part.bytes_per_slot
        flat = ring[:, begin : begin + size].view(part.dtype)
        shaped = flat.view(len(ring), *part.leading, *part.trailing)
        yield part.name, shaped.movedim(0, len(part.leading))
        begin += aligned(size)


def _pinned(slots: int, bytes_per_slot: int, device: torch.device) -> Tensor:
    """Return zeros in host memory, which a CUDA device reads and writes without the host.

    Registered and not allocated as pinned by torch, which rounds up to a power of two.
    """
    host = torch.zeros((slots, bytes_per_slot), dtype=torch.uint8)
    if device.type == "cuda":
        address = host.data_ptr()
        torch.cuda.check_error(_runtime().cudaHostRegister(address, host.nbytes, 0))
        # A process that ends lets its pages go by itself, maybe after CUDA.
        weakref.finalize(host.untyped_storage(), _unpin, address, device).atexit = False
    return host


def _unpin(address: int, device: torch.device) -> None:
    torch.cuda.synchronize(device)
    _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
