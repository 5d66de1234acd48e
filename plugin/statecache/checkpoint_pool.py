"""The checkpoint pool: recurrent states of the cache at rest, in int8 or as they are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from statecache.checkpoint_copies import STORED, Copies, copies_for
from statecache.checkpoint_layout import (
    ActiveState,
    SideState,
    estimate_bytes,
    pool_parts,
    row_view,
    signature,
)

__all__ = [
    "ActiveState",
    "CheckpointPool",
    "PoolDoesNotFitError",
    "SideState",
    "StoreReport",
    "estimate_bytes",
]

FLAG = "--statecache-int8-slots"
_log = logging.getLogger("statecache.checkpoint")


class PoolDoesNotFitError(ValueError):
    """More slots were asked for than fit in the memory that is free."""


def _free_bytes(device: torch.device) -> int | None:
    """Return the bytes free on `device`, or None where that is not known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    meminfo = Path("/proc/meminfo")
    if device.type == "cpu" and meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


class StoreReport:
    """What became of one store. Reading it waits for the device."""

    def __init__(self, flags: Tensor, settle: Callable[[Sequence[int]], tuple[int, ...]]) -> None:
        self._flags = flags
        self._settle = settle
        self._refused: tuple[int, ...] | None = None

    def refused(self) -> tuple[int, ...]:
        """Return the slots that hold no state: the pool has freed them, so forget them.

        Their source held NaN or Inf, could not come back finite, or lay at no valid active slot.
        """
        if self._refused is None:
            self._refused = self._settle(self._flags.tolist())
        return self._refused


class CheckpointPool:
    """Slots for cached states, copied in and out of an engine's active pool.

    In mode "int8" the temporal state is quantised; in mode "native" it is kept as it is.
    Convolution and side states are kept bit for bit in both. One launch moves all layers of all
    listed slots; on CUDA copies run on the current stream and nothing waits, except where
    `StoreReport` says so. Single-threaded by contract. A call that raises changes nothing.
    """

    def __init__(
        self,
        active: ActiveState,
        slots: int,
        *,
        mode: str = "int8",
        reserve_slot_zero: bool = False,
        free_bytes: int | None = None,
        copies: Copies | None = None,
    ) -> None:
        if slots < 1:
            raise ValueError(f"a checkpoint pool needs at least 1 slot, not {slots}")
        parts = pool_parts(active, mode)
        self._device = active.temporals()[0].device
        self._first = int(reserve_slot_zero)
        self._total = slots + self._first
        self.bytes_per_state = sum(part.bytes_per_slot for part in parts)
        self._require_memory(slots, free_bytes)
        self._mode = mode
        self._signature = signature(active)
        self._copies = copies or copies_for(self._device.type)
        self._tensors = {
            part.name: torch.zeros(part.shape(self._total), dtype=part.dtype, device=self._device)
            for part in parts
        }
        self._stores = 0
        self.clear()
        _log.info(
            "checkpoint pool: %d %s slots of %d bytes, %d bytes in all, copies by %s",
            slots,
            mode,
            self.bytes_per_state,
            self.total_bytes,
            self._copies.name,
        )

    @property
    def slots(self) -> int:
        """Slots that can be allocated; a reserved one does not count."""
        return self._total - self._first

    @property
    def available(self) -> int:
        """Slots that are free now."""
        return len(self._free)

    @property
    def total_bytes(self) -> int:
        """Bytes allocated."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._tensors.values())

    def alloc(self, n: int) -> list[int] | None:
        """Take `n` slots, or None when fewer are free."""
        if n < 0:
            raise ValueError(f"cannot allocate {n} slots")
        if n > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(n)]
        self._stored.update(dict.fromkeys(taken, 0))
        return taken

    def free(self, slots: Iterable[int]) -> None:
        """Give slots back; each must be allocated and be named once."""
        given = self._allocated(slots, "free")
        _require_distinct(given, "free")
        for slot in given:
            self._release(slot)

    def clear(self) -> None:
        """Give all slots back."""
        self._free = list(range(self._total - 1, self._first - 1, -1))
        self._stored: dict[int, int] = {}  # allocated slots: number of the last store, 0 for none
        self._pending: dict[int, StoreReport] = {}  # slots stored, report not read yet

    def store(
        self, active: ActiveState, active_slots: Sequence[int] | Tensor, slots: Sequence[int]
    ) -> StoreReport:
        """Copy active states into allocated slots; an entry below 0 on either side is skipped.

        A tensor of active slots is used as it is, without waiting for its values.
        """
        self._require_same(active)
        given = list(slots)
        sources = self._active_slots(active, active_slots, given)
        if not isinstance(active_slots, Tensor):
            pairs = zip(given, active_slots, strict=True)
            given = [slot if source >= 0 else -1 for slot, source in pairs]
        used = [slot for slot in given if slot >= 0]
        self._allocated(used, "store into")
        _require_distinct(used, "store into")
        flags = torch.zeros(len(given), dtype=torch.int32, device=self._device)
        targets = self._vector(given)
        self._move_exact(active, sources, targets, into_pool=True)
        if self._mode == "int8":
            self._copies.store(
                active.temporals(),
                self._tensors["quantized"],
                self._tensors["scale"],
                flags,
                sources,
                targets,
            )
        else:
            self._move_temporal(active, sources, targets, into_pool=True)
            count = active.temporals()[0].shape[-4]
            flags += ((sources >= 0) & (sources < count)).to(torch.int32) * STORED
        self._stores += 1
        report = StoreReport(flags, partial(self._settle, self._stores, given))
        for slot in used:
            self._stored[slot] = self._stores
            self._pending[slot] = report
        return report

    def load(
        self, slots: Sequence[int], active: ActiveState, active_slots: Sequence[int] | Tensor
    ) -> None:
        """Bring stored states back into active slots; an entry below 0 on either side is skipped.

        Reads the reports of these slots' stores if nobody has yet.
        """
        self._require_same(active)
        given = list(slots)
        targets = self._active_slots(active, active_slots, given)
        if not isinstance(active_slots, Tensor):
            _require_distinct([slot for slot in active_slots if slot >= 0], "load into active")
        used = self._allocated([slot for slot in given if slot >= 0], "load")
        for slot in used:
            if slot in self._pending:
                self._pending[slot].refused()
        for slot in used:
            if not self._stored.get(slot):
                raise ValueError(f"cannot load slot {slot}: no state is stored in it")
        sources = self._vector(given)
        self._move_exact(active, targets, sources, into_pool=False)
        if self._mode == "int8":
            self._copies.load(
                self._tensors["quantized"],
                self._tensors["scale"],
                active.temporals(),
                sources,
                targets,
            )
        else:
            self._move_temporal(active, targets, sources, into_pool=False)

    def _require_memory(self, slots: int, free_bytes: int | None) -> None:
        asked = self._total * self.bytes_per_state
        free = _free_bytes(self._device) if free_bytes is None else free_bytes
        if free is None or asked <= free:
            return
        fits = max(free // self.bytes_per_state - self._first, 0)
        advice = f"the largest that fits is {FLAG} {fits}" if fits else "not even one slot fits"
        raise PoolDoesNotFitError(
            f"{FLAG} {slots} needs {asked:,} bytes on {self._device}, {free:,} are free: {advice}"
        )

    def _require_same(self, active: ActiveState) -> None:
        given = signature(active)
        if given != self._signature:
            raise ValueError(
                f"the active state is {given}, the pool was made for {self._signature}"
            )

    def _allocated(self, slots: Iterable[int], verb: str) -> list[int]:
        given = list(slots)
        for slot in given:
            if not self._first <= slot < self._total:
                raise ValueError(f"cannot {verb} slot {slot}: this pool has no such slot")
            if slot not in self._stored:
                raise ValueError(f"cannot {verb} slot {slot}: it is not allocated")
        return given

    def _active_slots(
        self, active: ActiveState, active_slots: Sequence[int] | Tensor, slots: Sequence[int]
    ) -> Tensor:
        if len(active_slots) != len(slots):
            raise ValueError(f"{len(active_slots)} active slots for {len(slots)} slots")
        if isinstance(active_slots, Tensor):
            return active_slots.to(self._device, torch.int64).contiguous()
        count = active.temporals()[0].shape[-4]
        for slot in active_slots:
            if slot >= count:
                raise ValueError(f"active slot {slot} is not below {count}")
        return self._vector(active_slots)

    def _vector(self, slots: Sequence[int]) -> Tensor:
        if self._device.type != "cuda":
            return torch.tensor(slots, dtype=torch.int64, device=self._device)
        pinned = torch.tensor(slots, dtype=torch.int64, pin_memory=True)
        return pinned.to(self._device, non_blocking=True)

    def _move_exact(
        self, active: ActiveState, active_slots: Tensor, slots: Tensor, *, into_pool: bool
    ) -> None:
        for name, state in active.exact().items():
            rows, kept = row_view(state), self._tensors[name]
            if into_pool:
                self._copies.move(rows, kept, active_slots, slots, state.slot_dim)
            else:
                self._copies.move(kept, rows, slots, active_slots, state.slot_dim)

    def _move_temporal(
        self, active: ActiveState, active_slots: Tensor, slots: Tensor, *, into_pool: bool
    ) -> None:
        kept = self._tensors["temporal"]
        temporals = active.temporals()
        stacked = temporals[0].dim() == 5
        for layer, tensor in enumerate(temporals):
            ours = kept if stacked else kept[layer]
            if into_pool:
                self._copies.move(tensor, ours, active_slots, slots, int(stacked))
            else:
                self._copies.move(ours, tensor, slots, active_slots, int(stacked))

    def _release(self, slot: int) -> None:
        del self._stored[slot]
        self._pending.pop(slot, None)
        self._free.append(slot)

    def _settle(self, store: int, slots: Sequence[int], flags: Sequence[int]) -> tuple[int, ...]:
        """Take note of a report: free the slots that hold nothing, unless they were used since."""
        refused = []
        for slot, flag in zip(slots, flags, strict=True):
            if self._stored.get(slot) != store:
                continue
            self._pending.pop(slot, None)
            if flag != STORED:
                self._release(slot)
                refused.append(slot)
        return tuple(refused)


def _require_distinct(slots: Sequence[int], verb: str) -> None:
    seen: set[int] = set()
    for slot in slots:
        if slot in seen:
            raise ValueError(f"cannot {verb} slot {slot} twice")
        seen.add(slot)
