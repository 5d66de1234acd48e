"""The worker's half: the checkpoint pool of one device, and vLLM's worker around it.

`--worker-cls` is vLLM's own way to choose a worker. In vLLM 0.32 nothing else runs early enough in
both model runners: in V2 the connector is called after blocks were zeroed and copied.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import deque
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

from statecache.checkpoint.proof import SlotRecords
from statecache.engine.faults import guarded
from statecache.engine.settings import Settings, flag_of
from statecache.errors import escape_control_chars, exit_engine
from statecache_vllm import seams
from statecache_vllm.checkpoint_memory import (
    RING_STATES,
    describe,
    is_exact,
    pool_slots,
    set_aside,
)
from statecache_vllm.checkpoints import CheckpointCopy
from statecache_vllm.hand_over import new_barrier
from statecache_vllm.proof import StepProof, Unproved
from statecache_vllm.views import KVCacheConfig, SchedulerOutput, Tensor, VllmConfig, Worker

__all__ = ["CheckpointStore", "StoreReport", "WorkerSide"]

# Torch is the engine's, and not there where this package is only checked.
torch: Any = import_module("torch")


class StoreReport(NamedTuple):
    """What became of the stores of earlier steps.

    The states whose reports were read, which of them hold NaN or Inf, and those whose report is
    still on its way; and what the checks of this step found. Exact copies are not reported.
    """

    states: tuple[int, ...] = ()
    refused: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    failed: bool = False
    proof: StepProof = StepProof()


class WorkerSide:
    """Restores and stores of one worker. After a store that failed it stores no more."""

    def __init__(
        self, settings: Settings, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
    ) -> None:
        self.faults = new_barrier()
        self.store: CheckpointStore | None = None
        self._settings = settings
        self._configs = vllm_config, kv_cache_config
        self._failed = False

    def make_store(self) -> None:
        """Make the checkpoint pool for the states of this worker, if there is to be one."""
        if self._settings.checkpoints is not None:
            self.store = CheckpointStore(self._settings, *self._configs)

    def begin_step(self) -> None:
        """A step begins: the stores of the one before may be reported."""
        if self.store is not None:
            self.store.begin_step()

    def restore(self, copies: Sequence[CheckpointCopy]) -> None:
        """Bring states back; called before anything else in a step.

        Not guarded: a request that was promised a state must not go on without it.
        """
        if self.store is None:
            raise RuntimeError("statecache: this worker has no checkpoints to restore from")
        self.store.restore(copies)

    def _fail(self, *_: object) -> None:
        self._failed = True

    @guarded(_fail)
    def keep(self, copies: Sequence[CheckpointCopy]) -> None:
        """Store what a step committed; called after the forward."""
        if self.store is not None and not self._failed:
            self.store.store(copies)

    def _report_failure(self) -> StoreReport | None:
        self._failed = True
        return StoreReport(failed=True)

    def report(self) -> StoreReport | None:
        """Return what became of the stores of earlier steps, None where nothing is to be told.

        What the checks found is not guarded: a wrong answer must not go on because of an error.
        """
        proof = None if self.store is None else self.store.take_proof()
        report = self._report_stores()
        if proof is None:
            return report
        return (report or StoreReport())._replace(proof=proof)

    @guarded(_report_failure)
    def _report_stores(self) -> StoreReport | None:
        if self._failed:
            return self._report_failure()
        return None if self.store is None else self.store.report()


@dataclasses.dataclass
class _Pool:
    active: Any
    pool: Any
    groups: list[int]  # positions among the recurrent groups
    kind: str  # of its layers


class _Stored(NamedTuple):
    """The states stored in one step, and the report of each pool with the state of each slot."""

    states: tuple[int, ...]
    reports: tuple[tuple[_Pool, Any, dict[int, int]], ...]


class CheckpointStore:
    """Copies states between vLLM's blocks and slots. The scheduler decides which is where.

    A state of vLLM 0.32 is one block in each group of recurrent layers, and the groups lie over
    each other: layer `i` of every group may be the same tensor. Groups that share their tensors
    share a pool, in which a state takes one slot a group: one launch a tensor kind moves them all.

    What is restored is compared with the record of its slot; what does not fit is not restored and
    is in the next report. So is a state whose bytes have changed, which is known only then: the
    host does not wait for a sum before the forward.

    The host waits for no store either. What became of one is told in the next step, or in the first
    one after that in which its flags have come to the host.
    """

    def __init__(
        self, settings: Settings, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
    ) -> None:
        slots = pool_slots(settings, vllm_config, kv_cache_config)
        self._exact = is_exact(settings)
        library = import_module("statecache.checkpoint.pool")
        self._pools = []
        for active, positions, kind in _active_states(vllm_config, kv_cache_config):
            total = slots * len(positions)
            try:
                # Every slot stays allocated: the scheduler rules them.
                pool = library.CheckpointPool(
                    active,
                    total,
                    mode=settings.checkpoints,
                    keeps_refused=True,
                    memory="host" if settings.on_host else "device",
                    ring=RING_STATES * len(positions),
                )
            except (MemoryError, RuntimeError, library.PoolDoesNotFitError) as error:
                what = f"{slots} {settings.checkpoints} checkpoints"
                why = escape_control_chars(str(error))
                by_size = settings.on_host and settings.checkpoint_slots is None
                flag = flag_of("checkpoint_memory" if by_size else "checkpoint_slots")
                exit_engine(f"no memory for {what}: {why}: lower {flag}")
            except ValueError as error:
                why = escape_control_chars(str(error))
                exit_engine(f"a pool of {settings.checkpoints} checkpoints cannot be made: {why}")
            pool.alloc(total)
            self._pools.append(_Pool(active, pool, positions, kind))
        self.records = SlotRecords(settings.verify, self._sums)
        self._fresh: list[_Stored] = []  # of the step that runs
        self._due: deque[_Stored] = deque()
        self._launch_failures = 0
        self._errors: list[tuple[str, Any]] = []
        self._look_anew()

    def _look_anew(self) -> None:
        self._unproved: list[Unproved] = []
        self._compared: list[tuple[int, Any]] = []
        self._added_up = 0

    def begin_step(self) -> None:
        """A step begins: the stores of the one before may be reported."""
        self._due += self._fresh
        self._fresh.clear()

    def restore(self, copies: Sequence[CheckpointCopy]) -> None:
        """Bring states back into blocks, one launch a tensor kind."""
        proved = [copy for copy in copies if self._is_proved(copy)]
        for pool in self._pools if proved else ():
            blocks, slots, _ = _places(pool, proved)
            pool.pool.load(slots, pool.active, blocks)

    def _is_proved(self, copy: CheckpointCopy) -> bool:
        """Whether the slot says that it holds this state; its bytes are compared in the report."""
        what = self.records.mismatch(copy.slot, copy.prefix)
        if what is not None:
            self._unproved.append(Unproved(copy.state, what))
            return False
        sums = self.records.sums(copy.slot)
        if sums is not None:
            self._compared.append((copy.state, _to_host(torch.eq(*sums).all())))
        return True

    def store(self, copies: Sequence[CheckpointCopy]) -> None:
        """Keep states, one launch a tensor kind."""
        self.records.erase(copy.slot for copy in copies)
        reports = []
        for pool in self._pools:
            blocks, slots, states = _places(pool, copies)
            report = pool.pool.store(pool.active, blocks, slots)
            reports.append((pool, report, dict(zip(slots, states, strict=True))))
        if not self._exact:
            self._fresh.append(_Stored(tuple(copy.state for copy in copies), tuple(reports)))
        for copy in copies:
            if self.records.write(copy.slot, copy.prefix):
                self._added_up += 1
                self.records.look(self._measure, copy)

    def _sums(self, slot: int) -> Tensor:
        return torch.cat(
            [pool.pool.checksums(_slots_of(pool, slot)) for pool in self._pools],
        )

    def _measure(self, copy: CheckpointCopy) -> None:
        """Compare a state of int8 with the blocks it was made of."""
        for pool in () if self._exact else self._pools:
            for group, slot in zip(pool.groups, _slots_of(pool, copy.slot), strict=True):
                found = pool.pool.relative_errors(pool.active, [copy.blocks[group]], slot)
                self._errors.append((pool.kind, _to_host(found)))

    def report(self) -> StoreReport | None:
        """Return what is known by now of the stores of earlier steps, each told once.

        Those of one step are told together, and in the order of the steps. None where all was told.
        """
        if not self._due:
            return None
        stored: list[int] = []
        refused: dict[int, None] = {}
        while self._due and all(report.is_ready() for _, report, _ in self._due[0].reports):
            step = self._due.popleft()
            stored += step.states
            for pool, report, states in step.reports:
                slots = report.refused()
                refused.update(dict.fromkeys(states[slot] for slot in slots))
                self.records.erase(slot // len(pool.groups) for slot in slots)
        waiting = tuple(state for step in self._due for state in step.states)
        return StoreReport(tuple(stored), tuple(refused), waiting)

    def take_proof(self) -> StepProof | None:
        """Return what was found since the last time; None where nothing was looked at.

        Waits for the restores of this step that were compared, not for its forward.
        """
        failures = sum(pool.pool.launch_failures for pool in self._pools)
        news, self._launch_failures = failures - self._launch_failures, failures
        measured: list[tuple[str, Any]] = []
        waiting: list[tuple[str, Any]] = []
        for kind, found in self._errors:
            (measured if found.is_ready() else waiting).append((kind, found))
        self._errors = waiting
        if not (self._unproved or self._compared or self._added_up or news or measured):
            return None
        unproved = [
            *self._unproved,
            *(
                Unproved(state, "bytes")
                for state, is_same in self._compared
                if not bool(is_same.read())
            ),
        ]
        errors: dict[str, list[float]] = {}
        for kind, found in measured:
            # That of a state that was refused is not finite.
            errors.setdefault(kind, []).extend(filter(math.isfinite, found.read().tolist()))
        proof = StepProof(tuple(unproved), self._added_up, len(self._compared), errors, news)
        self._look_anew()
        return proof


def _to_host(tensor: Tensor) -> Any:
    return import_module("statecache.checkpoint.stream_order").HostCopy(tensor)


def _active_states(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> list[tuple[Any, list[int], str]]:
    """Return the states of the layers, the recurrent groups that keep theirs in them, their kind.

    The kind is that of the first such group.
    """
    library = import_module("statecache.checkpoint.pool")
    found: dict[tuple[int, ...], tuple[Any, list[int], str]] = {}
    state_groups, _, _ = seams.groups_of(kv_cache_config)
    for position, group in enumerate(state_groups):
        names = kv_cache_config.kv_cache_groups[group].layer_names
        layers = [describe(tensors) for tensors in seams.state_tensors(vllm_config, names)]
        where = tuple(temporal.data_ptr() for temporal, _ in layers)
        if where not in found:
            convolutions = [conv for _, several in layers for conv in several]
            active = library.ActiveState([temporal for temporal, _ in layers], convolutions)
            spec = kv_cache_config.kv_cache_groups[group].kv_cache_spec
            found[where] = (active, [], seams.kind_of(spec))
        found[where][1].append(position)
    return list(found.values())


def _slots_of(pool: _Pool, slot: int) -> list[int]:
    """Return the slots of `pool` that make up a slot of the scheduler's."""
    width = len(pool.groups)
    return [slot * width + at for at in range(width)]


def _places(
    pool: _Pool, copies: Sequence[CheckpointCopy]
) -> tuple[list[int], list[int], list[int]]:
    """Return block, slot and state of each copy in each group of `pool`."""
    blocks = [copy.blocks[group] for copy in copies for group in pool.groups]
    slots = [slot for copy in copies for slot in _slots_of(pool, copy.slot)]
    states = [copy.state for copy in copies for _ in pool.groups]
    return blocks, slots, states


_WORKERS = {"CpuCheckpointWorker": True, "CheckpointWorker": False}


@functools.cache
def _worker(name: str) -> Any:
    base = seams.worker_base(cpu=_WORKERS[name])

    def determine_available_memory(self: Worker) -> int:
        """Leave room for the checkpoints: what is returned becomes blocks."""
        available = int(base.determine_available_memory(self))
        transfer = self.vllm_config.kv_transfer_config
        settings = Settings.from_given(transfer.kv_connector_extra_config["statecache"], {})
        specs = self.model_runner.get_kv_cache_spec().values()
        return set_aside(settings, specs, available)

    def execute_model(self: Worker, scheduler_output: SchedulerOutput) -> Any:
        """Restore states, then do as vLLM does."""
        commands = scheduler_output.kv_connector_metadata
        if commands is not None:
            seams.transfer_group().restore(commands)
        return base.execute_model(self, scheduler_output)

    members = {
        "__doc__": f"vLLM's {base.__name__} with a checkpoint pool.",
        "__module__": __name__,
        "determine_available_memory": determine_available_memory,
        "execute_model": execute_model,
    }
    return type(name, (base,), members)


def __getattr__(name: str) -> Any:
    if name not in _WORKERS:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return _worker(name)
