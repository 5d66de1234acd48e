"""Every metric of the plugin, how events are counted, and how counts get to Prometheus.

An event adds to a plain number (`Counts`). About once a second what has changed since (`Changes`)
is put into the engine's own Prometheus metrics (`Exporter`): a call there takes microseconds where
several processes share them. This module needs no prometheus_client: the engine's classes are
handed in.

A key is the name of a metric, or "name|value" where the metric has a label of its own.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

__all__ = [
    "BUCKETS",
    "DRY_RUN",
    "METRICS",
    "PREFIX",
    "Changes",
    "Counts",
    "Exporter",
    "Metric",
    "PrometheusClasses",
    "Quiet",
    "Reporter",
    "merged",
]

_log = logging.getLogger("statecache.metrics")

PREFIX = "statecache_"
DRY_RUN = "dry_run"  # in the place of a policy, where nothing of the plugin is in place
_INTERVAL_SECONDS = 1.0
COMMON_LABELS = ("engine", "model_name", "rank")
# Shown as 0 from the start, as every counter without a label of its own: who reads two of them and
# takes the difference can tell "none" from "not counted".
_FROM_START = ("evictions|policy", "skips|not_cached")
BUCKETS = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 1e-1)
_WALK, _WALK_SUM = "walk_seconds", "walk_seconds_sum"


class Metric(NamedTuple):
    """One metric: its name without the prefix, and the label it has beside the common ones."""

    name: str
    kind: str
    help: str
    label: str = ""

    @property
    def full_name(self) -> str:
        """The name in `/metrics`."""
        return f"{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"


METRICS = (
    Metric(
        "active", "gauge", "1 while the plugin decides, 0 where the engine does again", "policy"
    ),
    Metric("states_resident", "gauge", "Cached recurrent states", "pool"),
    Metric("states_pinned", "gauge", "Cached states that may not be dropped now", "pool"),
    Metric("slots", "gauge", "Slots (or, of pool blocks, blocks) there are", "pool"),
    Metric("slots_free", "gauge", "Slots (or blocks) that hold nothing or may be taken", "pool"),
    Metric("requests", "counter", "Requests admitted to prefill"),
    Metric("prompt_tokens", "counter", "Tokens of those requests"),
    Metric("hit_requests", "counter", "Requests that resumed from a cached state"),
    Metric("hit_tokens", "counter", "Tokens that were not prefilled for that"),
    Metric(
        "missed_by_state_requests", "counter", "Requests whose KV reached beyond their last state"
    ),
    Metric(
        "missed_by_state_tokens",
        "counter",
        "Tokens prefilled although their KV was cached, for want of a state",
    ),
    Metric("evictions", "counter", "Cached states that were dropped", "reason"),
    Metric("skips", "counter", "States not cached or used: no slot, or not finite", "reason"),
    Metric("checkpoint_stores", "counter", "States stored in the checkpoint pool", "mode"),
    Metric("checkpoint_restores", "counter", "States restored from the checkpoint pool", "mode"),
    Metric("checkpoint_stored_bytes", "counter", "Bytes those stores wrote, on one rank", "mode"),
    Metric(
        "checkpoint_restored_bytes", "counter", "Bytes those restores read, on one rank", "mode"
    ),
    Metric(
        "learned_follows", "gauge", "1 for the order that the policy learned follows now", "policy"
    ),
    Metric("learned_ghosts", "gauge", "Evicted states that learned remembers, without data"),
    Metric("learned_points", "gauge", "Ends of prefixes that learned knows"),
    Metric("learned_prefixes", "gauge", "Prefixes that learned finds again in a prompt"),
    Metric(_WALK, "histogram", "Time of one eviction pass"),
    Metric("anomalies", "counter", "Things that must not happen; the engine went on by itself"),
    Metric("dry_run_requests", "counter", "Requests that the dry run replayed"),
    Metric("dry_run_rejected_requests", "counter", "Requests that do not fit its KV pool"),
    Metric("dry_run_prompt_tokens", "counter", "Tokens of the replayed ones, in whole blocks"),
    Metric(
        "dry_run_hit_tokens", "counter", "Tokens the policy would reuse; engine: reused", "policy"
    ),
    Metric(
        "dry_run_missed_by_state_tokens",
        "counter",
        "Tokens whose KV would be there and their state would not",
        "policy",
    ),
    Metric("dry_run_evictions", "counter", "States the policy would drop for room", "policy"),
)
_BY_NAME = {metric.name: metric for metric in METRICS}


class Counts:
    """What happened since the start, in plain numbers. Its calls take well under a microsecond."""

    __slots__ = ("numbers", "walk_seconds", "walks")

    def __init__(self) -> None:
        self.numbers: dict[str, float] = {}
        self.walks = [0] * (len(BUCKETS) + 1)
        self.walk_seconds = 0.0

    def add(self, key: str, amount: float = 1) -> None:
        """Count an event."""
        numbers = self.numbers
        numbers[key] = numbers.get(key, 0) + amount

    def walked(self, seconds: float) -> None:
        """An eviction pass took so long."""
        self.walks[bisect_left(BUCKETS, seconds)] += 1
        self.walk_seconds += seconds

    def admitted(self, prompt_tokens: int, hit_tokens: int, kv_tokens: int) -> None:
        """A request is prefilled from `hit_tokens` on; its KV is resident up to `kv_tokens`."""
        numbers = self.numbers
        get = numbers.get
        numbers["requests"] = get("requests", 0) + 1
        numbers["prompt_tokens"] = get("prompt_tokens", 0) + prompt_tokens
        if hit_tokens > 0:
            numbers["hit_requests"] = get("hit_requests", 0) + 1
            numbers["hit_tokens"] = get("hit_tokens", 0) + hit_tokens
        if kv_tokens > hit_tokens:
            missed = kv_tokens - hit_tokens
            numbers["missed_by_state_requests"] = get("missed_by_state_requests", 0) + 1
            numbers["missed_by_state_tokens"] = get("missed_by_state_tokens", 0) + missed

    def sample(self) -> dict[str, float]:
        """Return the numbers, those of the walks included."""
        walks = {f"{_WALK}|{at}": float(n) for at, n in enumerate(self.walks) if n}
        return self.numbers | walks | ({_WALK_SUM: self.walk_seconds} if walks else {})


class Changes:
    """Turns one sample after another into what has changed: counts since, gauges as they are."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def of(self, sample: Mapping[str, float]) -> dict[str, float]:
        """Return the changes since the last sample, without those that are 0."""
        found = {}
        for key, number in sample.items():
            metric = _BY_NAME.get(key.partition("|")[0])
            if metric is not None and metric.kind == "gauge":
                if self._last.get(key) != number:
                    found[key] = number
            elif number > self._last.get(key, 0):
                found[key] = number - self._last.get(key, 0)
        self._last.update(sample)
        return found


def merged(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    """Return two changes in a row as one."""
    result = dict(first)
    for key, number in second.items():
        metric = _BY_NAME.get(key.partition("|")[0])
        gauge = metric is not None and metric.kind == "gauge"
        result[key] = number if gauge else result.get(key, 0) + number
    return result


class PrometheusClasses(NamedTuple):
    """The engine's `Counter`, `Gauge` and `Histogram`: those of prometheus_client, or alike."""

    counter: Any
    gauge: Any
    histogram: Any


_made: dict[PrometheusClasses, dict[str, Any]] = {}


def _metrics_of(classes: PrometheusClasses) -> dict[str, Any]:
    """Return the metrics, made once in a process: a registry refuses a name that it has."""
    if classes not in _made:
        _made[classes] = {metric.name: _make(classes, metric) for metric in METRICS}
    return _made[classes]


def _make(classes: PrometheusClasses, metric: Metric) -> Any:
    labels = [*COMMON_LABELS, metric.label] if metric.label else list(COMMON_LABELS)
    options = {
        "name": PREFIX + metric.name,
        "documentation": metric.help,
        "labelnames": labels,
    }
    if metric.kind == "gauge":
        return classes.gauge(**options, multiprocess_mode="mostrecent")
    if metric.kind == "histogram":
        return classes.histogram(**options, buckets=BUCKETS)
    return classes.counter(**options)


class Exporter:
    """Puts changes into Prometheus metrics, for one engine, model and rank."""

    def __init__(self, classes: PrometheusClasses, engine: str, model: str, rank: object) -> None:
        self._metrics = _metrics_of(classes)
        self._common = (engine, model, str(rank))
        self._children: dict[str, Any] = {}
        for metric in METRICS:
            if metric.kind == "counter" and not metric.label:
                self._child(metric.name)
        for key in _FROM_START:
            self._child(key)

    def apply(self, changes: Mapping[str, float]) -> None:
        """Add what `Changes` found."""
        walks = {}
        for key, number in changes.items():
            name, _, label = key.partition("|")
            if name == _WALK:
                walks[int(label)] = number
            elif name != _WALK_SUM and _BY_NAME[name].kind == "gauge":
                self._child(key).set(number)
            elif name != _WALK_SUM:
                self._child(key).inc(number)
        if walks:
            _observe(self._child(_WALK), walks, changes.get(_WALK_SUM, 0.0))

    def _child(self, key: str) -> Any:
        child = self._children.get(key)
        if child is None:
            name, _, label = key.partition("|")
            values = (*self._common, label) if _BY_NAME[name].label else self._common
            child = self._children[key] = self._metrics[name].labels(*values)
        return child


def _observe(histogram: Any, walks: Mapping[int, float], seconds: float) -> None:
    """Add many observations at once: `observe` takes one, and microseconds for it.

    prometheus_client 0.26 keeps a value for each bucket and one for the sum. Other classes get the
    mean as often as there were walks.
    """
    buckets, total = getattr(histogram, "_buckets", None), getattr(histogram, "_sum", None)
    if buckets is None or total is None:
        count = int(sum(walks.values()))
        for _ in range(count):
            histogram.observe(seconds / count)
        return
    for at, number in walks.items():
        buckets[at].inc(number)
    total.inc(seconds)


class Quiet:
    """A call about metrics that never raises: the first failure is logged and was the last call."""

    def __init__(self, call: Callable[..., object]) -> None:
        self._call: Callable[..., object] | None = call

    def __call__(self, *args: Any) -> None:
        """Make the call."""
        if self._call is None:
            return
        try:
            self._call(*args)
        except Exception:
            self._call = None
            _log.exception("statecache: metrics failed; they are wrong from now on")


class Reporter:
    """Exports samples at intervals; whatever goes wrong there ends the reporting, nothing else.

    `make` returns what takes the changes, or None where the engine's metrics are off: then nothing
    was set up and nothing is sampled. It is called at the first report.
    """

    def __init__(
        self,
        sample: Callable[[], Mapping[str, float]],
        make: Callable[[], Callable[[dict[str, float]], object] | None],
    ) -> None:
        self._sample, self._make = sample, make
        self._take: Callable[[dict[str, float]], object] | None = None
        self._changes = Changes()
        self._next = 0.0
        self._export = Quiet(self._exported)

    def report(self, *, now: bool = False) -> None:
        """Export what has changed, if the last time is long enough ago or it is to be `now`."""
        at = time.monotonic()
        if at >= self._next or (now and self._take is not None):
            self._next = at + _INTERVAL_SECONDS
            self._export()

    def _exported(self) -> None:
        if self._take is None:
            self._take = self._make()
        if self._take is None:
            self._next = float("inf")
        else:
            self._take(self._changes.of(self._sample()))
