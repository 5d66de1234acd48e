"""The connector vLLM loads in the scheduler and in every worker: where the adapter meets it.

Each call goes to `SchedulerSide` or to `WorkerSide`. A worker stores after the forward; restores
run before anything else in a step, which `worker_side` sees to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from statecache.engine.settings import Settings
from statecache_vllm import recording, seams
from statecache_vllm.checkpoints import CheckpointCopy
from statecache_vllm.proof import StepProof
from statecache_vllm.reporting import StateMetrics, StateStats
from statecache_vllm.scheduler_side import SchedulerSide
from statecache_vllm.views import (
    ConnectorOutput,
    KVCacheBlocks,
    KVCacheConfig,
    KVCacheManager,
    Request,
    SchedulerOutput,
    Tensor,
    VllmConfig,
)
from statecache_vllm.worker_side import WorkerSide

_BASES = seams.connector_bases()
_Base: Any = _BASES[0]
_SupportsHma: Any = _BASES[1]
_Metadata: Any = _BASES[2]
_WorkerMetadata: Any = _BASES[3]


@dataclasses.dataclass
class StepCommands(_Metadata):  # type: ignore[misc]
    """What the workers are to copy in one step."""

    restores: list[CheckpointCopy] = dataclasses.field(default_factory=list)
    stores: list[CheckpointCopy] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Stored(_WorkerMetadata):  # type: ignore[misc]
    """What is known by now of the stores of earlier steps, on one worker or on all of them.

    `waiting` are the states whose report has not come yet; a worker without any says nothing.
    """

    states: tuple[int, ...] = ()
    refused: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    failed: bool = False
    proof: StepProof = dataclasses.field(default_factory=StepProof)

    def aggregate(self, other: Stored) -> Stored:
        """Return both as one: a state is there once no shard waits for its report.

        The last of them names it. A state that one shard refused is refused; one worker that
        failed is enough.
        """
        waiting = dict.fromkeys((*self.waiting, *other.waiting))
        states = dict.fromkeys((*self.states, *other.states))
        return Stored(
            tuple(state for state in states if state not in waiting),
            tuple(dict.fromkeys((*self.refused, *other.refused))),
            tuple(waiting),
            self.failed or other.failed,
            self.proof.merged(other.proof),
        )


class StateCacheConnector(_Base, _SupportsHma):  # type: ignore[misc]
    """The adapter's two halves behind vLLM's connector interface."""

    def __init__(
        self, vllm_config: VllmConfig, role: object, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        seams.share_log()
        given = vllm_config.kv_transfer_config.kv_connector_extra_config["statecache"]
        asked = Settings.from_given(given, {})
        self.settings = asked.in_force
        self._recording: recording.Recording | None = None
        self._scheduler_side: SchedulerSide | None = None
        self._worker_side: WorkerSide | None = None
        if seams.is_scheduler_role(role):
            self._scheduler_side = ours = SchedulerSide(self.settings, vllm_config, kv_cache_config)
            self._recording = recording.begin(asked, ours.faults, ours.report, kv_cache_config)
        else:
            self._worker_side = WorkerSide(self.settings, vllm_config, kv_cache_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether blocks may not be freed before they are handed on: never."""
        return False

    @property
    def scheduler_side(self) -> SchedulerSide:
        """The scheduler's half; there is none in a worker."""
        if self._scheduler_side is None:
            raise AttributeError("this connector is a worker's")
        return self._scheduler_side

    @property
    def worker_side(self) -> WorkerSide:
        """The worker's half; there is none in the scheduler."""
        if self._worker_side is None:
            raise AttributeError("this connector is the scheduler's")
        return self._worker_side

    # The scheduler's half.

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Take the place of the free queue, and see lookups and allocations."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self.scheduler_side.bind(kv_cache_manager)

    def on_new_request(self, request: Request) -> None:
        """A request was added."""
        self.scheduler_side.added(request)
        if self._recording is not None:
            self._recording.arrived(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """No tokens come from outside: a restored state makes the local hit longer.

        None tells vLLM to leave the request in its queue for this step and to go on with the next.
        """
        del num_computed_tokens
        return None if self.scheduler_side.must_wait(request) else 0, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """A request was admitted: what was found for it is now certain."""
        del num_external_tokens
        if self._recording is not None:
            self._recording.admitted(request)
        self.scheduler_side.admitted(request, blocks)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepCommands:
        """Return this step's copies."""
        restores, stores = self.scheduler_side.plan(scheduler_output)
        return StepCommands(restores, stores)

    def update_connector_output(self, connector_output: ConnectorOutput) -> None:
        """The workers report what they stored."""
        stored = connector_output.kv_connector_worker_meta
        if isinstance(stored, Stored):
            self.scheduler_side.stored(stored.states, stored.refused, failed=stored.failed)
            self.scheduler_side.note_proof(stored.proof)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        """A request ended; its blocks are freed as always."""
        del block_ids
        self._finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        """As `request_finished`, for a model with several groups."""
        del block_ids
        self._finished(request)
        return False, None

    def _finished(self, request: Request) -> None:
        self.scheduler_side.finished(request)
        if self._recording is not None:
            self._recording.ended(request)

    def shutdown(self) -> None:
        """The scheduler, or the worker, ends."""
        if self._recording is not None:
            self._recording.close()
        super().shutdown()

    def reset_cache(self) -> bool:
        """Forget every checkpoint."""
        self.scheduler_side.forget()
        return True

    # Metrics: numbers of the scheduler travel to the process that serves /metrics.

    def get_kv_connector_stats(self) -> StateStats | None:
        """Return what has changed, in the scheduler and about once a second."""
        if self._scheduler_side is None:
            return None
        found = self._scheduler_side.report.changes()
        return StateStats(found) if found else None

    @classmethod
    def build_kv_connector_stats(cls, data: object = None) -> StateStats:
        """Return nothing to log: vLLM would write every number every ten seconds."""
        del data
        return StateStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Mapping[object, object],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> StateMetrics:
        """Set up the metrics; not called where vLLM's are off."""
        return StateMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # A worker's half.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Make the checkpoint pool for the states of this worker."""
        del kv_caches
        self.worker_side.make_store()

    def restore(self, commands: object) -> None:
        """Bring states back; called before anything else in a step."""
        if isinstance(commands, StepCommands):
            self.worker_side.begin_step()
            if commands.restores:
                self.worker_side.restore(commands.restores)

    def wait_for_save(self) -> None:
        """Store what this step committed: after the forward, with a drafter after sampling."""
        commands = self._connector_metadata
        if isinstance(commands, StepCommands) and commands.stores:
            self.worker_side.keep(commands.stores)

    def build_connector_worker_meta(self) -> Stored | None:
        """Return what became of the stores of earlier steps."""
        report = self.worker_side.report()
        return None if report is None else Stored(*report)

    def start_load_kv(self, forward_context: object, **kwargs: object) -> None:
        """Nothing is loaded layer by layer."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded layer by layer."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: object, **kwargs: object
    ) -> None:
        """Nothing is saved layer by layer."""


class UnconnectedScheduler(StateCacheConnector):
    """The scheduler's half where vLLM is configured without a connector: workers have none."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> None:  # type: ignore[override]
        """Plan a step in which no worker copies anything."""
        super().build_connector_meta(scheduler_output)
