"""Every metric of the plugin: its name, what it counts, and the label it has of its own."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

__all__ = [
    "BUCKETS",
    "COMMON_LABELS",
    "DRY_RUN",
    "METRICS",
    "METRIC_BY_NAME",
    "PREFIX",
    "Metric",
    "MetricKey",
]

PREFIX = "statecache_"
DRY_RUN = "dry_run"  # in the place of a policy, where nothing of the plugin is in place
COMMON_LABELS = ("engine", "model_name", "rank")
BUCKETS = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 1e-1)


class MetricKey(StrEnum):
    """The name of every metric, without the prefix. Events are counted under it."""

    ACTIVE = "active"
    STATES_RESIDENT = "states_resident"
    STATES_PINNED = "states_pinned"
    SLOTS = "slots"
    SLOTS_FREE = "slots_free"
    REQUESTS = "requests"
    PROMPT_TOKENS = "prompt_tokens"
    HIT_REQUESTS = "hit_requests"
    HIT_TOKENS = "hit_tokens"
    MISSED_BY_STATE_REQUESTS = "missed_by_state_requests"
    MISSED_BY_STATE_TOKENS = "missed_by_state_tokens"
    HEAD_WAITS = "head_waits"
    HEAD_WAIT_STEPS = "head_wait_steps"
    HEAD_WAIT_SAVED_TOKENS = "head_wait_saved_tokens"
    DRAFT_TOKENS = "draft_tokens"
    ACCEPTED_TOKENS = "accepted_tokens"
    DRAFT_LOST_TOKENS = "draft_lost_tokens"
    EVICTIONS = "evictions"
    SKIPS = "skips"
    CHECKPOINT_STORES = "checkpoint_stores"
    CHECKPOINT_RESTORES = "checkpoint_restores"
    CHECKPOINT_STORED_BYTES = "checkpoint_stored_bytes"
    CHECKPOINT_RESTORED_BYTES = "checkpoint_restored_bytes"
    VERIFIED_STORES = "verified_stores"
    VERIFIED_RESTORES = "verified_restores"
    RESTORE_MISMATCHES = "restore_mismatches"
    INT8_ERROR_MAX = "int8_error_max"
    INT8_ERROR_SUM = "int8_error_sum"
    INT8_ERROR_LAYERS = "int8_error_layers"
    INT8_ERROR_ALARMS = "int8_error_alarms"
    LEARNED_FOLLOWS = "learned_follows"
    LEARNED_GHOSTS = "learned_ghosts"
    LEARNED_POINTS = "learned_points"
    LEARNED_PREFIXES = "learned_prefixes"
    WALK_SECONDS = "walk_seconds"
    ANOMALIES = "anomalies"
    DRY_RUN_REQUESTS = "dry_run_requests"
    DRY_RUN_REJECTED_REQUESTS = "dry_run_rejected_requests"
    DRY_RUN_PROMPT_TOKENS = "dry_run_prompt_tokens"
    DRY_RUN_HIT_TOKENS = "dry_run_hit_tokens"
    DRY_RUN_MISSED_BY_STATE_TOKENS = "dry_run_missed_by_state_tokens"
    DRY_RUN_EVICTIONS = "dry_run_evictions"

    def of(self, value: str) -> str:
        """Return the key of the metric's label `value`."""
        return f"{self.value}|{value}"


class Metric(NamedTuple):
    """One metric: its name without the prefix, and the label it has beside the common ones."""

    name: MetricKey
    kind: str
    help: str
    label: str = ""

    @property
    def full_name(self) -> str:
        """The name in `/metrics`."""
        return f"{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"


METRICS = (
    Metric(
        MetricKey.ACTIVE,
        "gauge",
        "1 while the plugin decides, 0 where the engine does again",
        "policy",
    ),
    Metric(MetricKey.STATES_RESIDENT, "gauge", "Cached recurrent states", "pool"),
    Metric(MetricKey.STATES_PINNED, "gauge", "Cached states that may not be dropped now", "pool"),
    Metric(MetricKey.SLOTS, "gauge", "Slots (or, of pool blocks, blocks) there are", "pool"),
    Metric(
        MetricKey.SLOTS_FREE, "gauge", "Slots (or blocks) that hold nothing or may be taken", "pool"
    ),
    Metric(MetricKey.REQUESTS, "counter", "Requests admitted to prefill"),
    Metric(MetricKey.PROMPT_TOKENS, "counter", "Tokens of those requests"),
    Metric(MetricKey.HIT_REQUESTS, "counter", "Requests that resumed from a cached state"),
    Metric(MetricKey.HIT_TOKENS, "counter", "Tokens that were not prefilled for that"),
    Metric(
        MetricKey.MISSED_BY_STATE_REQUESTS,
        "counter",
        "Requests whose KV reached beyond their last state",
    ),
    Metric(
        MetricKey.MISSED_BY_STATE_TOKENS,
        "counter",
        "Tokens prefilled although their KV was cached: their state was not",
    ),
    Metric(
        MetricKey.HEAD_WAITS,
        "counter",
        "Requests that waited for the state of a head that another one was computing",
    ),
    Metric(MetricKey.HEAD_WAIT_STEPS, "counter", "Steps in which such a request was passed over"),
    Metric(
        MetricKey.HEAD_WAIT_SAVED_TOKENS,
        "counter",
        "Tokens they did not compute again, beyond what was cached when they began to wait",
    ),
    Metric(MetricKey.DRAFT_TOKENS, "counter", "Tokens that a drafter proposed"),
    Metric(MetricKey.ACCEPTED_TOKENS, "counter", "Of these, those that the model accepted"),
    Metric(
        MetricKey.DRAFT_LOST_TOKENS,
        "counter",
        "Tokens that could be reused without a drafter and cannot be with it",
    ),
    Metric(MetricKey.EVICTIONS, "counter", "Cached states that were dropped", "reason"),
    Metric(
        MetricKey.SKIPS,
        "counter",
        "States not cached or used: no slot, not finite, off a page, past a stop, handed on",
        "reason",
    ),
    Metric(MetricKey.CHECKPOINT_STORES, "counter", "States stored in the checkpoint pool", "mode"),
    Metric(
        MetricKey.CHECKPOINT_RESTORES, "counter", "States restored from the checkpoint pool", "mode"
    ),
    Metric(
        MetricKey.CHECKPOINT_STORED_BYTES,
        "counter",
        "Bytes those stores wrote, on one rank",
        "mode",
    ),
    Metric(
        MetricKey.CHECKPOINT_RESTORED_BYTES,
        "counter",
        "Bytes those restores read, on one rank",
        "mode",
    ),
    Metric(MetricKey.VERIFIED_STORES, "counter", "States whose bytes were added up when stored"),
    Metric(
        MetricKey.VERIFIED_RESTORES, "counter", "Restores whose bytes were compared with that sum"
    ),
    Metric(
        MetricKey.RESTORE_MISMATCHES,
        "counter",
        "States that were not what their slot should hold; never used",
        "what",
    ),
    Metric(
        MetricKey.INT8_ERROR_MAX,
        "gauge",
        "Largest relative error of a layer of a verified int8 state",
        "kind",
    ),
    Metric(
        MetricKey.INT8_ERROR_SUM,
        "counter",
        "Relative errors of the layers of verified int8 states, added up",
        "kind",
    ),
    Metric(MetricKey.INT8_ERROR_LAYERS, "counter", "Layers in that sum", "kind"),
    Metric(
        MetricKey.INT8_ERROR_ALARMS,
        "counter",
        "Layers of verified int8 states with an error above the bound",
    ),
    Metric(
        MetricKey.LEARNED_FOLLOWS,
        "gauge",
        "1 for the order that the policy learned follows now",
        "policy",
    ),
    Metric(
        MetricKey.LEARNED_GHOSTS, "gauge", "Evicted states that learned remembers, without data"
    ),
    Metric(MetricKey.LEARNED_POINTS, "gauge", "Ends of prefixes that learned knows"),
    Metric(MetricKey.LEARNED_PREFIXES, "gauge", "Prefixes that learned finds again in a prompt"),
    Metric(MetricKey.WALK_SECONDS, "histogram", "Time of one eviction pass"),
    Metric(
        MetricKey.ANOMALIES, "counter", "Things that must not happen; the engine went on by itself"
    ),
    Metric(MetricKey.DRY_RUN_REQUESTS, "counter", "Requests that the dry run replayed"),
    Metric(MetricKey.DRY_RUN_REJECTED_REQUESTS, "counter", "Requests that do not fit its KV pool"),
    Metric(
        MetricKey.DRY_RUN_PROMPT_TOKENS, "counter", "Tokens of the replayed ones, in whole blocks"
    ),
    Metric(
        MetricKey.DRY_RUN_HIT_TOKENS,
        "counter",
        "Tokens the policy would reuse; engine: reused",
        "policy",
    ),
    Metric(
        MetricKey.DRY_RUN_MISSED_BY_STATE_TOKENS,
        "counter",
        "Tokens whose KV would be there and their state would not",
        "policy",
    ),
    Metric(
        MetricKey.DRY_RUN_EVICTIONS, "counter", "States the policy would drop for room", "policy"
    ),
)
METRIC_BY_NAME: dict[str, Metric] = {metric.name: metric for metric in METRICS}
