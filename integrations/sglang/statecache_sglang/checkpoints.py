"""The int8 checkpoint pool in the place of SGLang's own: same life cycle, same calls."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any

from statecache.checkpoint.proof import Prefix, SlotRecords
from statecache.engine.settings import flag_of
from statecache.errors import escape_control_chars, exit_engine
from statecache_sglang.pool_views import Configurator, RequestPool, Tensor
from statecache_sglang.seams import slots as state_slots
from statecache_sglang.unsupported import refuse_draft_states
from statecache_sglang.views import (
    TreeCache,
)

__all__ = [
    "CheckpointMemory",
    "CheckpointSlots",
    "evict_no_checkpoints",
    "no_own_pool",
    "slots_beside",
]

_log = logging.getLogger("statecache.sglang")
_GIB = 1 << 30

# Torch is the engine's, and not there where this package is only checked.
torch: Any = import_module("torch")


def _library() -> Any:
    try:
        return import_module("statecache.checkpoint.pool")
    except ImportError as error:
        exit_engine(f"{flag_of('checkpoints')} int8 is not part of this installation ({error})")


class CheckpointSlots:
    """A `CheckpointPool` as SGLang calls its own: slots are int64 tensors, slot 0 is reserved.

    A slot that is handed out is a view of a list of all slots on the device, so where it lies in
    memory says its number. What became of a store is read two steps of the scheduler later, by when
    SGLang 0.5.23 itself has waited for the batch behind it; until then no request may start from
    the state. So nothing here waits for the device, but for `numbers` of joined slots, `read_all`
    while copies run (a hit on such a state without the extra buffer), and a closer look.

    `records` says what each slot holds; the share `verify` is looked at closely.
    """

    def __init__(self, pool: RequestPool, slots: int, verify: float = 0.0) -> None:
        self._active = _active_state(pool)
        self._pool = _library().CheckpointPool(
            self._active, slots, reserve_slot_zero=True, keeps_refused=True
        )
        device = state_slots.device_of(pool)
        self._handles = torch.arange(slots + 1, dtype=torch.int64, device=device)
        self._first_handle = self._handles.data_ptr()
        self.num_slots = slots
        self.refused = self.stored = self.restored = self.failed = self.waits = 0
        self.records = SlotRecords(verify, lambda slot: self._pool.checksums([slot]))
        self._last: tuple[list[int], Tensor] | None = None  # the last store: slots, active slots
        self._step = 0
        self._unread: dict[int, tuple[int, Any]] = {}  # by slot: step and report, oldest first
        self._empty: set[int] = set()  # allocated slots whose store kept nothing

    def alloc(self, n: int = 1) -> Tensor | None:
        """Take `n` slots, or None when fewer are free."""
        taken = self._pool.alloc(n)
        if taken is None:
            return None
        handles: list[Tensor] = [self._handles[slot : slot + 1] for slot in taken]
        return handles[0] if n == 1 else _joined(handles)

    def numbers(self, slots: Tensor) -> list[int]:
        """Return the numbers of slots, without asking the device if `alloc(1)` gave them."""
        place = (slots.data_ptr() - self._first_handle) // 8
        if 0 <= place <= self.num_slots and len(slots) == 1:
            return [place]
        self.waits += 1
        return slots.tolist()

    def free(self, slots: Tensor) -> None:
        """Give slots back."""
        given = self.numbers(slots)
        self._pool.free(given)
        self._forget(given)

    def available_size(self) -> int:
        """Return how many slots are free."""
        return int(self._pool.available)

    def clear(self) -> None:
        """Give all slots back."""
        self._pool.clear()
        self.records.clear()
        self._unread.clear()
        self._empty.clear()
        self._last = None

    def mem_usage_bytes(self) -> int:
        """Return the bytes the pool holds."""
        return int(self._pool.total_bytes)

    @property
    def anomalies(self) -> int:
        """Return how many stores failed, and how many kernels could not be launched."""
        return self.failed + int(self._pool.launch_failures)

    @property
    def bytes_per_state(self) -> int:
        """Return the bytes of one state at rest."""
        return int(self._pool.bytes_per_state)

    def store_from_active(self, _pool: object, active_slots: Tensor, slots: Tensor) -> None:
        """Quantise active states into slots; ask `was_refused` afterwards.

        A store that fails keeps nothing, as one that is refused does: the states are not cached.
        """
        taken = self.numbers(slots)
        self._forget(taken)
        self._last = taken, active_slots
        try:
            report = self._pool.store(self._active, active_slots, taken)
        except Exception:
            self.failed += 1
            if self.failed == 1:
                _log.exception("statecache: a state could not be stored; it is not cached")
            self._empty.update(taken)
            return
        self.stored += len(taken)
        self._unread.update(dict.fromkeys(taken, (self._step, report)))
        if report.is_on_host:
            self._read(taken)

    def was_refused(self, slots: Tensor) -> bool:
        """Whether the store into these slots is known to have kept nothing, as of NaN or Inf."""
        return not self._empty.isdisjoint(self.numbers(slots))

    def unread_since(self, slots: Tensor) -> int | None:
        """Return the step of the store into these slots, None if what became of it is known."""
        steps = (self._unread[slot][0] for slot in self.numbers(slots) if slot in self._unread)
        return max(steps, default=None)

    def begin_step(self) -> list[int]:
        """A step of the scheduler begins: return the slots that are now known to hold nothing.

        Reads what was stored before the step before this one. The same on every rank: a report that
        is late after all is waited for.
        """
        self._step += 1
        due = [slot for slot, (step, _) in self._unread.items() if step < self._step - 1]
        return self._read(due)

    def read_all(self) -> list[int]:
        """Nothing runs: read every report, and return the slots now known to hold nothing."""
        return self._read(list(self._unread))

    def _read(self, slots: list[int]) -> list[int]:
        refused = []
        for slot in slots:
            _, report = self._unread.pop(slot)
            self.waits += not report.is_ready()
            if slot in report.refused():
                refused.append(slot)
        self.refused += len(refused)
        self._empty.update(refused)
        self.records.erase(refused)
        return refused

    def _forget(self, slots: list[int]) -> None:
        self.records.erase(slots)
        self._empty.difference_update(slots)
        for slot in slots:
            self._unread.pop(slot, None)

    def record(self, prefix: Prefix) -> list[float] | None:
        """Write down what the one state of the last store is of; it cannot be used before.

        Returns None unless it is looked at closely; then the errors of its layers.
        """
        last, self._last = self._last, None
        if last is None:
            return None
        (slot,), active_slots = last
        if slot in self._empty or not self.records.write(slot, prefix):
            return None
        if slot in self._unread and self._read([slot]):
            return None

        def errors(source: Tensor) -> list[float]:
            found = self._pool.relative_errors(self._active, source, slot)
            return [] if found is None else found.tolist()

        return self.records.look(errors, active_slots) or []

    def mismatch(self, slots: Tensor, prefix: Prefix) -> str | None:
        """Return what of the record of this one slot does not fit `prefix`, None if all does."""
        (slot,) = self.numbers(slots)
        return self.records.mismatch(slot, prefix)

    def compare_bytes(self, slots: Tensor) -> bool | None:
        """Whether the bytes of this one slot are those that were stored; None: not looked at."""
        (slot,) = self.numbers(slots)
        sums = self.records.sums(slot)
        return None if sums is None else bool(torch.equal(*sums))

    def load_to_active(self, _pool: object, slots: Tensor, active_slots: Tensor) -> None:
        """Bring states back into active slots: those of matches, none of which was unread."""
        self.restored += len(slots)
        self._pool.load(slots, self._active, active_slots)


class CheckpointMemory:
    """A pool of `slots` states, built beside those of running requests; None: of as many bytes.

    The share `verify` of states is looked at closely.
    """

    def __init__(self, slots: int | None, verify: float) -> None:
        _library()
        self._slots = slots
        self._verify = verify

    def build_beside(
        self,
        original: Callable[..., None],
        pool: RequestPool,
        *args: object,
        **kwargs: object,
    ) -> None:
        """Around `HybridReqToTokenPool._init_mamba_pool`: cached states live in the plugin's pool.

        Memory that cannot be had stops the process.
        """
        if state_slots.checkpoint_pool(pool) is not None:  # of a copy for a draft head
            refuse_draft_states()
        original(pool, *args, **kwargs)
        slots = slots_beside(pool) if self._slots is None else self._slots
        try:
            checkpoints = CheckpointSlots(pool, slots, self._verify)
        except (MemoryError, RuntimeError, _library().PoolDoesNotFitError) as error:
            exit_engine(
                f"no memory for an int8 checkpoint pool of {slots} states:"
                f" {escape_control_chars(str(error))}: lower {flag_of('checkpoint_slots')}"
            )
        except ValueError as error:
            exit_engine(
                f"an int8 checkpoint pool cannot be made: {escape_control_chars(str(error))}"
            )
        state_slots.set_checkpoint_pool(pool, checkpoints)
        _log.info(
            "statecache: int8 checkpoint pool of %d states, %d bytes",
            checkpoints.num_slots,
            checkpoints.mem_usage_bytes(),
        )

    def take_off_budget(
        self, original: Callable[..., object], configurator: Configurator, rest_gib: float
    ) -> object:
        """Around `KVCacheConfigurator._handle_max_mamba_cache`: without the bytes of the pool.

        A pool that leaves nothing for states and KV stops the process.
        """
        rest = int(rest_gib * _GIB)
        if self._slots is None:
            needed = _bytes_of_states(configurator, rest)
            what = f"{flag_of('checkpoints')} int8"
        else:
            needed = _bytes_of(configurator, self._slots)
            what = f"{flag_of('checkpoint_slots')} {self._slots}"
        if needed >= rest:
            exit_engine(
                f"{what} needs {needed:,} bytes, {max(rest, 0):,} are left for states and KV"
            )
        return original(configurator, rest_gib - needed / _GIB)


def no_own_pool(_original: Callable[..., object], **_kwargs: object) -> None:
    """In the place of `maybe_init_int8_mamba_checkpoint_pool`."""


def evict_no_checkpoints(
    original: Callable[..., object],
    cache: TreeCache,
    params: object,
    *args: object,
    **kwargs: object,
) -> object:
    """Around `UnifiedRadixCache.evict_for_alloc`: no state is dropped for want of an active slot.

    SGLang 0.5.23 compares the shortage with the active pool, but the states it drops lie in the
    checkpoint pool, and free no active slot.
    """
    if state_slots.checkpoint_pool(cache.req_to_token_pool) is not None:
        params = state_slots.without_states(params)
    return original(cache, params, *args, **kwargs)


def slots_beside(pool: RequestPool) -> int:
    """Return how many int8 states fit in the bytes that the states of running requests take.

    What a server gets that names no number. The reserved slots of both pools count.
    """
    library = _library()
    active = _active_state(pool)
    running = int(library.estimate_bytes(active, 1, mode="native"))
    at_rest = int(library.estimate_bytes(active, 1))
    return max((int(pool.mamba_pool.size) + 1) * running // at_rest - 1, 1)


def _joined(slots: list[Tensor]) -> Tensor:
    joined: Tensor = torch.cat(slots)
    return joined


def _active_state(pool: RequestPool) -> Any:
    library = _library()
    temporal, conv = state_slots.temporal_and_conv(pool)
    side = {
        name: library.SideState(tensor, slot_dim)
        for name, (tensor, slot_dim) in state_slots.side_states(pool).items()
    }
    return library.ActiveState(temporal, conv, side)


def _bytes_of_states(configurator: Configurator, rest: int) -> int:
    """Return the bytes of a pool as big as SGLang's own, out of what is left for states and KV.

    See `slots_beside` for the states in it. Where no number is given SGLang fills its share of x
    bytes with k + 1 slots and, with a drafter, the states of each draft, which k requests / slots a
    request have and one more: the solution below has its own slots take as much as the pool.
    """
    slots, ratio = state_slots.requested_state_slots()
    slot = int(state_slots.bytes_of_a_state(configurator))
    if slots is not None:
        return (slots + 1) * slot
    share = ratio / (1 + ratio)
    drafts, slots_a_request = state_slots.draft_states(configurator)
    verified = drafts * (slot - state_slots.side_bytes_of_a_state(configurator))
    grown, fixed = slot + verified / slots_a_request, slot + verified
    return int(slot * (share * rest - fixed + grown) / (grown + slot * share))


def _bytes_of(configurator: Configurator, slots: int) -> int:
    library = _library()
    layers, params = state_slots.state_layout(configurator)

    def empty(shape: tuple[int, ...], dtype: object) -> Tensor:
        tensor: Tensor = torch.empty((layers, 1, *shape), dtype=dtype, device="meta")
        return tensor

    active = library.ActiveState(
        empty(params.shape.temporal, params.dtype.temporal),
        [empty(shape, params.dtype.conv) for shape in params.shape.conv],
    )
    beside = state_slots.side_bytes_of_a_state(configurator) * (slots + 1)
    return int(library.estimate_bytes(active, slots, reserve_slot_zero=True)) + beside
