"""What the metrics say of a scheduler, and how that gets to vLLM's `/metrics`.

vLLM 0.32 serves `/metrics` in the API process. What the scheduler's connector returns from
`get_kv_connector_stats` travels there with the outputs of a step: what has changed since the last
time, so that several API processes may share the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from statecache.engine.metric_table import DRY_RUN, MetricKey
from statecache.engine.metrics import (
    BestEffort,
    EventCounters,
    Exporter,
    PrometheusClasses,
    Reporter,
    merged,
)
from statecache.engine.settings import Settings
from statecache_vllm import seams
from statecache_vllm.checkpoint_memory import bytes_per_state
from statecache_vllm.views import (
    FoundBlocks,
    KVCacheConfig,
    ModelRunnerOutput,
    Request,
    SchedulerOutput,
    VllmConfig,
)

if TYPE_CHECKING:
    from statecache_vllm.checkpoints import CheckpointManager
    from statecache_vllm.hand_over import ActiveParts

__all__ = ["SchedulerReport", "StateMetrics", "StateStats", "policy_label"]

_BASES = seams.stats_bases()
_Stats: Any = _BASES[0]
_PromMetrics: Any = _BASES[1]


def policy_label(settings: Settings) -> str:
    """Return the block policy and, with a checkpoint pool, the policy of its slots."""
    if settings.dry_run:
        return DRY_RUN
    pool = "" if settings.checkpoints is None else f"+{settings.policy}"
    return f"{settings.block_policy}{pool}"


class SchedulerReport:
    """Counts requests of one scheduler, and reads the numbers of its parts at intervals."""

    def __init__(
        self,
        settings: Settings,
        parts: ActiveParts,
        kv_cache_config: KVCacheConfig,
        proofs: EventCounters,
    ) -> None:
        self._settings, self._parts, self._proofs = settings, parts, proofs
        mode = settings.checkpoints
        self._bytes = 0 if mode is None else bytes_per_state(mode, kv_cache_config)
        self.counts = EventCounters()
        self._found: dict[str, tuple[int, int, int]] = {}
        self._of_checkpoints: dict[str, float] = {}
        self._pending: dict[str, float] = {}
        self._reporter = Reporter(self._sample, lambda: self._take)
        self._best_effort = BestEffort(_call)
        self.also: Callable[[], dict[str, float]] = dict
        """What else is to be shown."""
        self.reach_and_loss: Callable[[Request, FoundBlocks], tuple[int, int]] = lambda _, found: (
            found[2],
            0,
        )
        """How far the KV of a request reaches, and the tokens behind that lost to a drafter."""
        self._is_last = False

    def looked_up(self, request: Request, found: FoundBlocks) -> None:
        """A request was looked up; the last time before it is admitted counts."""
        self._best_effort(self._note, request, found)

    def _note(self, request: Request, found: FoundBlocks) -> None:
        reach, lost = self.reach_and_loss(request, found)
        self._found[request.request_id] = (found[1], reach, lost)

    def admitted(self, request: Request) -> None:
        """A request is going to be prefilled from what was last found for it."""
        self._best_effort(self._count_admitted, request)

    def hit_of(self, request: Request) -> int:
        """Return the tokens that were last found for a request that is going to be admitted."""
        return self._found.get(request.request_id, (0, 0, 0))[0]

    def _count_admitted(self, request: Request) -> None:
        hit, resident, lost = self._found.pop(request.request_id, (0, 0, 0))
        self.counts.admitted(request.num_tokens, hit, resident)
        if lost:
            self.counts.add(MetricKey.DRAFT_LOST_TOKENS.value, lost)

    def stepped(self, step: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """The output of a step is there: which drafted tokens were accepted is known."""
        if step.scheduled_spec_decode_tokens:
            self._best_effort(self._count_drafts, step, output)

    def _count_drafts(self, step: SchedulerOutput, output: ModelRunnerOutput) -> None:
        drafted = accepted = 0
        invalid = step.num_invalid_spec_tokens or {}
        for name, drafts in step.scheduled_spec_decode_tokens.items():
            at = output.req_id_to_index.get(name)
            sampled = output.sampled_token_ids[at] if at is not None else ()
            if sampled:
                drafted += len(drafts) - invalid.get(name, 0)
                accepted += len(sampled) - 1
        self.counts.add(MetricKey.DRAFT_TOKENS.value, drafted)
        self.counts.add(MetricKey.ACCEPTED_TOKENS.value, accepted)

    def finished(self, name: str, *, last: bool) -> None:
        """A request ended, admitted or not; after the last one there may be no step for long."""
        self._found.pop(name, None)
        self._is_last = last

    def changes(self) -> dict[str, float]:
        """Return what has changed: about once a second, and after the last request."""
        self._reporter.flush(force=self._is_last)
        self._is_last = False
        found, self._pending = self._pending, {}
        return found

    def _take(self, changes: Mapping[str, float]) -> None:
        self._pending = merged(self._pending, changes)

    def _sample(self) -> dict[str, float]:
        parts, settings = self._parts, self._settings
        ordered = settings.block_policy != "stock"
        active = (ordered or bool(settings.checkpoints)) and not (
            (ordered and parts.queue is None)
            or (settings.checkpoints and parts.checkpoints is None)
        )
        if parts.checkpoints is not None:
            self._of_checkpoints = self._sample_checkpoints(parts.checkpoints)
        return {
            **self.counts.sample(),
            **self._proofs.sample(),
            **self._of_checkpoints,
            **self.also(),
            MetricKey.ACTIVE.of(policy_label(settings)): float(active),
            MetricKey.ANOMALIES.value: parts.faults.anomalies,
            # The null block is never handed out.
            MetricKey.SLOTS.of("blocks"): parts.pool.num_gpu_blocks - 1,
            MetricKey.SLOTS_FREE.of("blocks"): parts.pool.get_num_free_blocks(),
        }

    def _sample_checkpoints(self, checkpoints: CheckpointManager) -> dict[str, float]:
        """Return the numbers of the checkpoint pool; the counts outlive a pool that failed."""
        mode, counts = self._settings.checkpoints or "", checkpoints.counts
        return {
            **checkpoints.events.sample(),
            **checkpoints.tree.sample(),
            MetricKey.SLOTS.of("checkpoint"): checkpoints.slots,
            MetricKey.SLOTS_FREE.of("checkpoint"): checkpoints.slots - len(checkpoints),
            MetricKey.STATES_RESIDENT.of("checkpoint"): len(checkpoints),
            MetricKey.STATES_PINNED.of("checkpoint"): checkpoints.pinned,
            MetricKey.CHECKPOINT_STORES.of(mode): counts.stored,
            MetricKey.CHECKPOINT_RESTORES.of(mode): counts.restored,
            MetricKey.CHECKPOINT_STORED_BYTES.of(mode): counts.stored * self._bytes,
            MetricKey.CHECKPOINT_RESTORED_BYTES.of(mode): counts.restored * self._bytes,
        }


def _call(method: Callable[..., None], *args: object) -> None:
    method(*args)


class StateStats(_Stats):  # type: ignore[misc]
    """Changes on their way to the API process."""

    def aggregate(self, other: StateStats) -> StateStats:
        """Return both as one."""
        return StateStats(merged(self.data, other.data))

    def is_empty(self) -> bool:
        """Whether nothing has changed."""
        return not self.data

    def reset(self) -> None:
        """Forget them."""
        self.data.clear()

    def reduce(self) -> dict[str, int | float]:
        """Return them as they are."""
        return dict(self.data)


class StateMetrics(_PromMetrics):  # type: ignore[misc]
    """The metrics in the API process."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: Mapping[object, object],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        given = vllm_config.kv_transfer_config.kv_connector_extra_config["statecache"]
        label = policy_label(Settings.from_given(given, {}))
        classes = PrometheusClasses(self._counter_cls, self._gauge_cls, self._histogram_cls)
        model = labelnames.index("model_name")
        self._sinks: dict[int, Callable[[dict[str, float]], None]] = {}
        for rank, values in per_engine_labelvalues.items():
            exporter = Exporter(classes, "vllm", str(values[model]), rank)
            # Its scheduler has the connector in place before there are metrics.
            exporter.apply({MetricKey.ACTIVE.of(label): float(label not in ("stock", DRY_RUN))})
            self._sinks[rank] = BestEffort(exporter.apply)

    def observe(self, transfer_stats_data: dict[str, float], engine_idx: int = 0) -> None:
        """Add what has changed in one scheduler."""
        self._sinks[engine_idx](transfer_stats_data)
