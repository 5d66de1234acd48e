"""How events are counted, and how counts get to Prometheus.

An event adds to a plain number (`EventCounters`). About once a second what has changed since
(`MetricDeltas`) is put into the engine's own Prometheus metrics (`Exporter`): a call there takes
microseconds where several processes share them. This module needs no prometheus_client: the
engine's classes are handed in.

A key is the name of a metric, or "name|value" where the metric has a label of its own.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from statecache.engine.metric_table import (
    BUCKETS,
    COMMON_LABELS,
    DRY_RUN,
    METRIC_BY_NAME,
    METRICS,
    PREFIX,
    Metric,
    MetricKey,
)
from statecache.index.shadow_reference import ORDERS

if TYPE_CHECKING:
    from statecache.index.interface import EvictionIndex

__all__ = [
    "BUCKETS",
    "MetricKey",
    "DRY_RUN",
    "METRICS",
    "PREFIX",
    "MetricDeltas",
    "EventCounters",
    "Exporter",
    "Metric",
    "PrometheusClasses",
    "BestEffort",
    "Reporter",
    "learned_numbers",
    "merged",
]

_log = logging.getLogger("statecache.metrics")

_INTERVAL_SECONDS = 1.0
# Shown as 0 from the start, as every counter without a label of its own: who reads two of them and
# takes the difference can tell "none" from "not counted".
_FROM_START = (MetricKey.EVICTIONS.of("policy"), MetricKey.SKIPS.of("not_cached"))
_WALK, _WALK_SUM = MetricKey.WALK_SECONDS.value, "walk_seconds_sum"
# As plain texts: a member of an enum takes longer to find than to count.
_REQUESTS, _PROMPT_TOKENS = MetricKey.REQUESTS.value, MetricKey.PROMPT_TOKENS.value
_HIT_REQUESTS, _HIT_TOKENS = MetricKey.HIT_REQUESTS.value, MetricKey.HIT_TOKENS.value
_MISSED_REQUESTS = MetricKey.MISSED_BY_STATE_REQUESTS.value
_MISSED_TOKENS = MetricKey.MISSED_BY_STATE_TOKENS.value


class EventCounters:
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
        """A request is prefilled from `hit_tokens` on; its KV is resident up to `kv_tokens`.

        Neither counts beyond the prompt, whatever the engine says.
        """
        if hit_tokens > prompt_tokens:
            hit_tokens = prompt_tokens
        if kv_tokens > prompt_tokens:
            kv_tokens = prompt_tokens
        numbers = self.numbers
        get = numbers.get
        numbers[_REQUESTS] = get(_REQUESTS, 0) + 1
        numbers[_PROMPT_TOKENS] = get(_PROMPT_TOKENS, 0) + prompt_tokens
        if hit_tokens > 0:
            numbers[_HIT_REQUESTS] = get(_HIT_REQUESTS, 0) + 1
            numbers[_HIT_TOKENS] = get(_HIT_TOKENS, 0) + hit_tokens
        if kv_tokens > hit_tokens:
            numbers[_MISSED_REQUESTS] = get(_MISSED_REQUESTS, 0) + 1
            numbers[_MISSED_TOKENS] = get(_MISSED_TOKENS, 0) + kv_tokens - hit_tokens

    def sample(self) -> dict[str, float]:
        """Return the numbers, those of the walks included."""
        walks = {f"{_WALK}|{at}": float(n) for at, n in enumerate(self.walks) if n}
        return self.numbers | walks | ({_WALK_SUM: self.walk_seconds} if walks else {})


def learned_numbers(index: EvictionIndex, prefixes: int) -> dict[str, float]:
    """Return what a policy that needs prompts has itself; it finds `prefixes` again in a prompt."""
    followed = index.order
    return {
        MetricKey.LEARNED_GHOSTS.value: index.ghosts,
        MetricKey.LEARNED_POINTS.value: index.points,
        MetricKey.LEARNED_PREFIXES.value: prefixes,
        **{MetricKey.LEARNED_FOLLOWS.of(order): float(order == followed) for order in ORDERS},
    }


class MetricDeltas:
    """Turns one sample after another into what has changed: counts since, gauges as they are."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def of(self, sample: Mapping[str, float]) -> dict[str, float]:
        """Return the changes since the last sample, without those that are 0."""
        found = {}
        for key, number in sample.items():
            metric = METRIC_BY_NAME.get(key.partition("|")[0])
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
        metric = METRIC_BY_NAME.get(key.partition("|")[0])
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
        """Add what `MetricDeltas` found."""
        walks = {}
        for key, number in changes.items():
            name, _, label = key.partition("|")
            if name == _WALK:
                walks[int(label)] = number
            elif name != _WALK_SUM and METRIC_BY_NAME[name].kind == "gauge":
                self._child(key).set(number)
            elif name != _WALK_SUM:
                self._child(key).inc(number)
        if walks:
            _observe(self._child(_WALK), walks, changes.get(_WALK_SUM, 0.0))

    def _child(self, key: str) -> Any:
        child = self._children.get(key)
        if child is None:
            name, _, label = key.partition("|")
            values = (*self._common, label) if METRIC_BY_NAME[name].label else self._common
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


class BestEffort:
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
        self._changes = MetricDeltas()
        self._next = 0.0
        self._export = BestEffort(self._exported)

    def flush(self, *, force: bool = False) -> None:
        """Export what has changed, if the last time is long enough ago, or with `force`."""
        at = time.monotonic()
        if at >= self._next or (force and self._take is not None):
            self._next = at + _INTERVAL_SECONDS
            self._export()

    def _exported(self) -> None:
        if self._take is None:
            self._take = self._make()
        if self._take is None:
            self._next = float("inf")
        else:
            self._take(self._changes.of(self._sample()))
