"""The connector vLLM loads in the scheduler and in every worker: where the adapter meets it.

In the scheduler it takes the place of the free queue and plans stores and restores; in a worker it
stores after the forward. Restores run before anything else in a step (`worker.py`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from statecache.engine.settings import Settings
from statecache_vllm import recording, seams
from statecache_vllm.guard import Guard
from statecache_vllm.reporting import StateMetrics, StateStats

_BASES = seams.connector_bases()
_Base: Any = _BASES[0]
_SupportsHma: Any = _BASES[1]
_Metadata: Any = _BASES[2]
_WorkerMetadata: Any = _BASES[3]


@dataclasses.dataclass
class StepCommands(_Metadata):  # type: ignore[misc]
    """What the workers are to copy in one step: (state, slot, block of each group)."""

    restores: list[tuple[int, int, tuple[int, ...]]] = dataclasses.field(default_factory=list)
    stores: list[tuple[int, int, tuple[int, ...]]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Stored(_WorkerMetadata):  # type: ignore[misc]
    """What became of the stores of one step, on one worker or on all of them."""

    states: tuple[int, ...]
    refused: tuple[int, ...]
    failed: bool = False

    def aggregate(self, other: Any) -> Stored:
        """A state that one shard refused is refused; one worker that failed is enough."""
        refused = tuple({*self.refused, *other.refused})
        return Stored(self.states, refused, self.failed or other.failed)


class StateCacheConnector(_Base, _SupportsHma):  # type: ignore[misc]
    """The adapter's two halves behind vLLM's connector interface."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        seams.share_log()
        given = vllm_config.kv_transfer_config.kv_connector_extra_config["statecache"]
        asked = Settings.from_given(given, {})
        self.settings = asked.in_force
        self._planner: Any = None
        self._recording: recording.Recording | None = None
        self._store: Any = None
        self.guard = Guard()
        self._failed = False  # a store failed: this worker stores no more
        if seams.is_scheduler_role(role):
            from statecache_vllm.scheduler_side import Planner

            self._planner = Planner(self.settings, vllm_config, kv_cache_config)
            self.guard = self._planner.guard
            self._recording = recording.begin(asked, self._planner, kv_cache_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether blocks may not be freed before they are handed on: never."""
        return False

    @property
    def planner(self) -> Any:
        """The scheduler's half."""
        return self._planner

    # The scheduler's half.

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Take the place of the free queue, and see lookups and allocations."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if self.settings.dry_run:
            seams.end_requests_as_without_a_connector(kv_cache_manager)
        self._planner.bind(kv_cache_manager)

    def on_new_request(self, request: Any) -> None:
        """A request was added."""
        self._planner.added(request)
        if self._recording is not None:
            self._recording.arrived(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """No tokens come from outside: a restored state makes the local hit longer."""
        del request, num_computed_tokens
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """A request was admitted: what was found for it is now certain."""
        del num_external_tokens
        if self._recording is not None:
            self._recording.admitted(request)
        self._planner.admitted(request, blocks)

    def build_connector_meta(self, scheduler_output: Any) -> StepCommands:
        """Return this step's copies."""
        restores, stores = self._planner.plan(scheduler_output.kv_connector_block_state)
        return StepCommands(restores, stores)

    def update_connector_output(self, connector_output: Any) -> None:
        """The workers report what they stored."""
        stored = connector_output.kv_connector_worker_meta
        if isinstance(stored, Stored):
            self._planner.stored(stored.states, stored.refused, failed=stored.failed)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """A request ended; its blocks are freed as always."""
        del block_ids
        self._finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        """As `request_finished`, for a model with several groups."""
        del block_ids
        self._finished(request)
        return False, None

    def _finished(self, request: Any) -> None:
        self._planner.finished(request)
        if self._recording is not None:
            self._recording.ended(request)

    def shutdown(self) -> None:
        """The scheduler, or the worker, ends."""
        if self._recording is not None:
            self._recording.close()
        super().shutdown()

    def reset_cache(self) -> bool:
        """Forget every checkpoint."""
        self._planner.forget()
        return True

    # Metrics: numbers of the scheduler travel to the process that serves /metrics.

    def get_kv_connector_stats(self) -> StateStats | None:
        """Return what has changed, in the scheduler and about once a second."""
        if self._planner is None:
            return None
        found = self._planner.report.changes()
        return StateStats(found) if found else None

    @classmethod
    def build_kv_connector_stats(cls, data: Any = None) -> StateStats:
        """Return nothing to log: vLLM would write every number every ten seconds."""
        del data
        return StateStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> StateMetrics:
        """Set up the metrics; not called where vLLM's are off."""
        return StateMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # A worker's half.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Make the checkpoint pool for the states of this worker."""
        del kv_caches
        if self.settings.checkpoint_mode is None:
            return
        from statecache_vllm.checkpoint_store import CheckpointStore

        self._store = CheckpointStore(self.settings, self._vllm_config, self._kv_cache_config)

    def restore(self, commands: Any) -> None:
        """Bring states back; called before anything else in a step.

        Not guarded: a request that was promised a state must not go on without it.
        """
        if isinstance(commands, StepCommands) and commands.restores:
            if self._store is None:
                raise RuntimeError("statecache: this worker has no checkpoints to restore from")
            self._store.restore(commands.restores)

    def wait_for_save(self) -> None:
        """Store what this step committed: called after the forward."""
        commands = self._connector_metadata
        if self._store is not None and isinstance(commands, StepCommands) and commands.stores:
            self.guard.wrap(self._save, self._note_failure)(commands.stores)

    def _save(self, stores: Any) -> None:
        if not self._failed:
            self._store.store(stores)

    def _note_failure(self, *_: object) -> None:
        self._failed = True

    def build_connector_worker_meta(self) -> Stored | None:
        """Return what became of this step's stores."""
        return self.guard.wrap(self._report, self._report_failure)()

    def _report(self) -> Stored | None:
        if self._failed:
            return self._report_failure()
        report = None if self._store is None else self._store.report()
        return None if report is None else Stored(*report)

    def _report_failure(self) -> Stored:
        self._failed = True
        return Stored((), (), failed=True)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is loaded layer by layer."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded layer by layer."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing is saved layer by layer."""
