"""The checkpoint pool: recurrent states of the cache at rest, in int8 or as they are."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from operator import index
from typing import Literal

import torch
from torch import Tensor

from statecache.checkpoint.copy_streams import CopyStreams
from statecache.checkpoint.formats import format_named
from statecache.checkpoint.launches import PoolLaunches, upload_pairs
from statecache.checkpoint.layout import (
    ActiveState,
    Layout,
    SideState,
    bytes_per_slot,
    estimate_bytes,
    layout_of,
    pool_parts,
    slot_total,
)
from statecache.checkpoint.measure import checksum, relative_errors
from statecache.checkpoint.memory import PoolDoesNotFitError, free_bytes_on
from statecache.checkpoint.ops import STORED, CheckpointOps, ops_for
from statecache.checkpoint.report import StoreReport
from statecache.checkpoint.selftest import working_ops
from statecache.checkpoint.slot_arguments import active_slots_in, integers, require_distinct, vector
from statecache.checkpoint.slot_memory import (
    RING_ROWS,
    DeviceSlots,
    HostSlots,
    SlotMemory,
    turn_on,
)
from statecache.checkpoint.stream_order import StreamOrdering

__all__ = [
    "ActiveState",
    "CheckpointPool",
    "PoolDoesNotFitError",
    "SideState",
    "StoreReport",
    "estimate_bytes",
]

_log = logging.getLogger("statecache.checkpoint")


class CheckpointPool:
    """Slots for cached states, copied in and out of an engine's active pool.

    `mode` names the format of temporal states, a row of `statecache.checkpoint.formats`.
    Convolution and side states are kept bit for bit in all. Only states of a format that is not
    exact are looked at: NaN and Inf in anything that is kept bit for bit are stored and come back
    like other values.

    One launch moves all layers of all listed slots, and one more everything that is kept bit for
    bit beside states that are not. A copy uploads its slots once, cleared flags with them; a store
    that may skip or refuse a state brings its flags back once. On CUDA copies run on the current
    stream, each after the pool's copy before it, on whatever stream that ran; the host does not
    wait, except where it says so. Neither copy may be captured in a CUDA graph, which raises
    `RuntimeError`; the operators of `statecache.checkpoint.ops` may. Single-threaded by contract.

    A new pool stores and loads one small state on its device. If that does not work, copies are
    made by plain torch operators, with a warning; if those do not work either,
    `CopiesDoNotWorkError`. Where a kernel cannot be launched later, the plain operators make that
    copy and all that follow.

    In `memory` "host" slots lie in pinned host memory. A kernel works on a ring of at most `ring`
    rows on the device, from and to which slots are copied on streams of their own, ordered by
    events: still no call waits. A ring of fewer rows than a copy has states takes turns.

    A call that is refused changes nothing. Should a copy fail after it has begun, the slots of a
    store hold nothing, and the active slots of a load are undefined.

    With `keeps_refused` the slots of a refused store stay allocated, and hold nothing, until they
    are freed: for a caller that hands them on before it reads the report.
    """

    def __init__(
        self,
        active: ActiveState,
        slots: int,
        *,
        mode: str = "int8",
        reserve_slot_zero: bool = False,
        keeps_refused: bool = False,
        free_bytes: int | None = None,
        copies: CheckpointOps | None = None,
        memory: Literal["device", "host"] = "device",
        ring: int = RING_ROWS,
        streams: CopyStreams | None = None,
    ) -> None:
        self._keeps_refused = keeps_refused
        self._total = slot_total(slots, reserve_slot_zero=reserve_slot_zero)
        self._first = int(reserve_slot_zero)
        layout = layout_of(active, mode)
        parts = pool_parts(layout, mode)
        self._device = layout.temporals[0].device
        self._on_host = memory == "host"
        self.bytes_per_state = bytes_per_slot(parts, memory)
        self._require_memory(slots, free_bytes)
        self._format = format_named(mode)
        self._signature = layout.signature
        self._order = StreamOrdering(self._device)
        self._order.begin()
        self._memory: SlotMemory = (
            HostSlots(parts, self._total, self._device, ring=ring, streams=streams)
            if self._on_host
            else DeviceSlots(parts, self._total, self._device)
        )
        self._slot_dims = {part.name: len(part.leading) for part in parts}
        self._order.end()
        temporal = layout.temporals[0]
        matrix = (temporal.shape[-2], temporal.shape[-1])
        ops = copies or ops_for(str(self._device))
        ops = working_ops(ops, self._device, mode, temporal.dtype, matrix)
        self._launches = PoolLaunches(self._format, ops, layout, self._memory.tensors)
        self._last = active, layout
        self._stores = 0
        self.clear()
        _log.info(
            "statecache: a pool of %d %s slots of %d bytes, %d bytes in all in %s memory, copies by"
            " %s",
            slots,
            mode,
            self.bytes_per_state,
            self.total_bytes,
            memory,
            ops.name,
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
    def launch_failures(self) -> int:
        """How often a copy fell back on plain torch operators: its kernel could not be launched."""
        return self._launches.failures

    @property
    def total_bytes(self) -> int:
        """Bytes allocated for slots."""
        return self._memory.slot_bytes

    @property
    def ring_bytes(self) -> int:
        """Bytes allocated on the device beside slots in host memory."""
        return self._memory.ring_bytes

    def alloc(self, n: int) -> list[int] | None:
        """Take `n` slots, or None when fewer are free."""
        if n < 0:
            raise ValueError(f"cannot allocate {n} slots")
        if n > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(n)]
        self._stored.update(dict.fromkeys(taken, 0))
        self._refused.difference_update(taken)
        return taken

    def free(self, slots: Iterable[int]) -> None:
        """Give slots back; each must be allocated and be named once."""
        given = self._allocated(slots, "free")
        require_distinct(given, "free")
        for slot in given:
            self._release(slot)

    def clear(self) -> None:
        """Give all slots back."""
        self._free = list(range(self._total - 1, self._first - 1, -1))
        self._stored: dict[int, int] = {}  # allocated slots: number of the last store, 0 for none
        self._pending: dict[int, StoreReport] = {}  # slots stored, report not read yet
        self._refused: set[int] = set()  # free slots, freed because their store was refused

    def store(
        self, active: ActiveState, active_slots: Sequence[int] | Tensor, slots: Sequence[int]
    ) -> StoreReport:
        """Copy active states into allocated slots; an entry below 0 on either side is skipped.

        A slot that is skipped is left as it is. A tensor of active slots is used as it is, without
        waiting for its values: entries beyond the active slots are skipped too, and what was
        skipped is known once the report is read. Reports of earlier stores into its slots are read
        first, if nobody has, which waits for those stores. In a list such an entry is refused.
        """
        self._order.begin()
        layout = self._checked(active)
        given = integers(slots)
        listed = active_slots_in(layout.slots, active_slots, given)
        unseen = isinstance(listed, Tensor)
        if not isinstance(listed, Tensor):
            pairs = zip(given, listed, strict=True)
            given = [slot if source >= 0 else -1 for slot, source in pairs]
        used = [slot for slot in given if slot >= 0]
        if unseen:
            self._read_reports(used)
        self._allocated(used, "store into")
        require_distinct(used, "store into")
        known = self._format.exact and not unseen
        rows = self._memory.rows(given)
        targets, sources, cleared = upload_pairs(
            rows, listed, 0 if known else len(given), self._device
        )
        flags = None if known else cleared
        seen: Tensor | list[int] = [STORED] * len(given)
        before = {slot: self._stored[slot] for slot in used} if unseen else {}
        for slot in used:
            self._stored[slot] = 0
            self._pending.pop(slot, None)
        try:
            for part in self._memory.batches(len(given)):
                with turn_on(self._memory, rows[part]):
                    self._memory.write(rows[part])
                    kept = [slot if before.get(slot) else -1 for slot in given[part]]
                    self._memory.fetch(kept, rows[part])
                    asked = None if flags is None else flags[part]
                    self._launches.store(layout, sources[part], targets[part], asked)
                    self._memory.send(given[part], rows[part])
            if flags is not None:
                seen = flags.to("cpu", non_blocking=True)
        finally:
            done = self._order.end()
        self._stores += 1
        settle = partial(self._settle, self._stores, given, before)
        report = StoreReport(seen, None if known else done, settle)
        for slot in used:
            self._stored[slot] = self._stores
            self._pending[slot] = report
        return report

    def load(
        self,
        slots: Sequence[int] | Tensor,
        active: ActiveState,
        active_slots: Sequence[int] | Tensor,
    ) -> None:
        """Bring stored states back into active slots; an entry below 0 on either side is skipped.

        Reads the reports of these slots' stores if nobody has yet, which waits for those stores.
        Entries of a tensor beyond the active slots are skipped, in a list they are refused. A
        tensor of slots is used as it is, without waiting for its values: that they hold states, by
        the reports of their stores, is for the caller to know. Slots in host memory are listed.
        """
        self._order.begin()
        layout = self._checked(active)
        given = vector(slots, "slots") if isinstance(slots, Tensor) else integers(slots)
        listed = active_slots_in(layout.slots, active_slots, given)
        if not isinstance(listed, Tensor):
            require_distinct([slot for slot in listed if slot >= 0], "load into active")
        rows = self._memory.rows(given)
        if not isinstance(given, Tensor):
            used = [slot for slot in given if slot >= 0]
            self._read_reports(used)
            self._in_use(used, "load")
        sources, targets, _ = upload_pairs(rows, listed, 0, self._device)
        try:
            for part in self._memory.batches(len(given)):
                with turn_on(self._memory, rows[part]):
                    self._memory.fetch(given[part], rows[part])
                    self._launches.load(layout, sources[part], targets[part])
                self._memory.release(rows[part])
        finally:
            self._order.end()

    def checksums(self, slots: Sequence[int]) -> Tensor:
        """Return one sum of the bytes of each slot, all tensors, int64 on the device.

        See `statecache.checkpoint.measure.checksum`; the tensors come in the order of the pool. The
        host does not wait.
        """
        self._order.begin()
        given = self._in_use(integers(slots), "add up")
        try:
            return torch.stack([self._checksum(slot) for slot in given])
        finally:
            self._order.end()

    def relative_errors(
        self, active: ActiveState, active_slot: Sequence[int] | Tensor, slot: int
    ) -> Tensor | None:
        """Return the error of a stored state by layer, None in a format that is exact.

        See `statecache.checkpoint.measure.relative_errors`. `active_slot`, one number or a vector
        of one on the device, still holds what was stored. The host does not wait.
        """
        if self._format.exact:
            return None
        self._order.begin()
        layout = self._checked(active)
        (given,) = self._in_use([index(slot)], "compare")
        try:
            rows = self._memory.rows([given])
            self._memory.fetch([given], rows)
            listed = active_slots_in(layout.slots, active_slot, [given])
            target, source, _ = upload_pairs(rows, listed, 0, self._device)
            ops, tensors = self._launches.ops, self._memory.tensors
            errors = relative_errors(self._format, ops, layout, tensors, source, target)
            self._memory.release(rows)
            return errors
        finally:
            self._order.end()

    def _checksum(self, slot: int) -> Tensor:
        rows = self._memory.rows([slot])
        self._memory.fetch([slot], rows)
        found = checksum(self._rows(rows[0]))
        self._memory.release(rows)
        return found

    def _rows(self, row: int) -> Iterable[Tensor]:
        for name, tensor in self._memory.tensors.items():
            yield tensor.select(self._slot_dims[name], row)

    def _require_memory(self, slots: int, free_bytes: int | None) -> None:
        asked = self._total * self.bytes_per_state
        device = torch.device("cpu") if self._on_host else self._device
        free = free_bytes_on(device) if free_bytes is None else free_bytes
        if free is None or asked <= free:
            return
        fits = max(free // self.bytes_per_state - self._first, 0)
        where = "the host" if self._on_host else str(device)
        raise PoolDoesNotFitError(slots, asked, free, fits, where)

    def _checked(self, active: ActiveState) -> Layout:
        if active is self._last[0]:
            return self._last[1]
        layout = layout_of(active, self._format.name)
        if layout.signature != self._signature:
            raise ValueError(
                f"the active state is {layout.signature}, the pool was made for {self._signature}"
            )
        self._last = active, layout
        return layout

    def _read_reports(self, slots: Iterable[int]) -> None:
        for slot in slots:
            if slot in self._pending:
                self._pending[slot].refused()

    def _allocated(self, slots: Iterable[int], verb: str) -> list[int]:
        given = list(slots)
        for slot in given:
            if not self._first <= slot < self._total:
                raise ValueError(f"cannot {verb} slot {slot}: this pool has no such slot")
            if slot in self._refused:
                raise ValueError(
                    f"cannot {verb} slot {slot}: its store was refused and the slot was freed"
                )
            if slot not in self._stored:
                raise ValueError(f"cannot {verb} slot {slot}: it is not allocated")
        return given

    def _in_use(self, slots: Sequence[int], verb: str) -> Sequence[int]:
        for slot in self._allocated(slots, verb):
            if not self._stored[slot]:
                raise ValueError(f"cannot {verb} slot {slot}: no state is stored in it")
        return slots

    def _release(self, slot: int) -> None:
        del self._stored[slot]
        self._pending.pop(slot, None)
        self._free.append(slot)

    def _settle(
        self, store: int, slots: Sequence[int], before: Mapping[int, int], flags: Sequence[int]
    ) -> tuple[int, ...]:
        """Take note of a report, where slots were not used since.

        What was skipped holds again what it held `before`; what was refused holds nothing.
        """
        refused = []
        for slot, flag in zip(slots, flags, strict=True):
            if self._stored.get(slot) != store:
                continue
            self._pending.pop(slot, None)
            if not flag:
                self._stored[slot] = before[slot]
            elif flag != STORED:
                if self._keeps_refused:
                    self._stored[slot] = 0
                else:
                    self._release(slot)
                    self._refused.add(slot)
                refused.append(slot)
        return tuple(refused)
