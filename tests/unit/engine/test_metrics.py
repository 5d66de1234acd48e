"""How metrics are counted and exported, with the classes of prometheus_client."""

import os
import subprocess
import sys

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from statecache.engine.metrics import (
    BUCKETS,
    METRICS,
    BestEffort,
    EventCounters,
    Exporter,
    MetricDeltas,
    PrometheusClasses,
    Reporter,
    merged,
)

CLASSES = PrometheusClasses(
    prometheus_client.Counter, prometheus_client.Gauge, prometheus_client.Histogram
)


def value(name: str, model: str, **labels: str) -> float | None:
    every = {"engine": "vllm", "model_name": model, "rank": "0", **labels}
    return prometheus_client.REGISTRY.get_sample_value(f"statecache_{name}", every)


def test_a_request_counts_what_it_reused_and_what_it_missed_by_state() -> None:
    """100 of 150 tokens reused of 120 with KV: 20 missed. A cold one. One that found all."""
    counts = EventCounters()
    counts.admitted(150, 100, 120)
    counts.admitted(80, 0, 0)
    counts.admitted(60, 50, 50)
    assert counts.sample() == {
        "requests": 3,
        "prompt_tokens": 290,
        "hit_requests": 2,
        "hit_tokens": 150,
        "missed_by_state_requests": 1,
        "missed_by_state_tokens": 20,
    }


def test_kv_that_is_not_known_counts_no_miss() -> None:
    """The engine says 0 where the KV reaches no further than the state."""
    counts = EventCounters()
    counts.admitted(150, 100, 0)
    assert "missed_by_state_tokens" not in counts.sample()


@pytest.mark.parametrize("over", [-1, 0, 1, 2, 100])
def test_what_an_engine_says_beyond_the_prompt_is_not_counted(over: int) -> None:
    """Of 3 prompts of 100 tokens 300 can be reused, or missed, at most."""
    counts = EventCounters()
    for _ in range(3):
        counts.admitted(100, 100 + over, 100 + over)
    counts.admitted(100, 40, 100 + over)
    found = counts.sample()
    assert found["hit_tokens"] == 3 * min(100 + over, 100) + 40
    assert found["missed_by_state_tokens"] == min(100 + over, 100) - 40


def test_walks_fall_in_the_bucket_that_bounds_them() -> None:
    counts = EventCounters()
    for seconds in (1e-5, 1.1e-5, 0.5, 0.05):
        counts.walked(seconds)
    assert counts.sample() == {
        "walk_seconds|0": 1,
        "walk_seconds|1": 1,
        "walk_seconds|11": 1,
        "walk_seconds|13": 1,
        "walk_seconds_sum": pytest.approx(0.550021),
    }
    assert BUCKETS[11] == 0.05


def test_changes_are_counts_since_and_gauges_that_moved() -> None:
    changes = MetricDeltas()
    first = {"requests": 2, "slots|active": 8, "states_resident|active": 0}
    assert changes.of(first) == first
    assert changes.of(first) == {}
    moved = {"requests": 5, "slots|active": 8, "states_resident|active": 3, "evictions|policy": 1}
    assert changes.of(moved) == {
        "requests": 3,
        "states_resident|active": 3,
        "evictions|policy": 1,
    }
    assert changes.of({"states_resident|active": 0}) == {"states_resident|active": 0}


def test_changes_in_a_row_add_up_and_the_later_gauge_counts() -> None:
    first = {"requests": 2, "slots_free|active": 8, "walk_seconds|3": 1, "walk_seconds_sum": 0.5}
    second = {"requests": 1, "slots_free|active": 5, "walk_seconds|3": 2, "walk_seconds_sum": 0.25}
    assert merged(first, second) == {
        "requests": 3,
        "slots_free|active": 5,
        "walk_seconds|3": 3,
        "walk_seconds_sum": 0.75,
    }


def test_what_is_exported_is_what_was_counted() -> None:
    exporter = Exporter(CLASSES, "vllm", "exported", 0)
    assert value("requests_total", "exported") == 0  # there before the first request
    assert value("evictions_total", "exported", reason="policy") == 0
    assert value("skips_total", "exported", reason="not_cached") == 0
    exporter.apply({"requests": 2, "active|gds": 1, "evictions|policy": 4, "slots_free|blocks": 9})
    exporter.apply({"requests": 3, "slots_free|blocks": 7})
    assert value("requests_total", "exported") == 5
    assert value("active", "exported", policy="gds") == 1
    assert value("evictions_total", "exported", reason="policy") == 4
    assert value("slots_free", "exported", pool="blocks") == 7
    exporter.apply({"walk_seconds|0": 2, "walk_seconds|3": 1, "walk_seconds_sum": 0.25})
    assert value("walk_seconds_bucket", "exported", le="1e-05") == 2
    assert value("walk_seconds_bucket", "exported", le="5e-05") == 2
    assert value("walk_seconds_bucket", "exported", le="0.0001") == 3
    assert value("walk_seconds_bucket", "exported", le="+Inf") == 3
    assert value("walk_seconds_sum", "exported") == 0.25


def test_many_observations_at_once_are_those_one_by_one() -> None:
    """The way past `observe` ends where it does, whatever the version of prometheus_client."""
    seconds = [1e-6, 1e-5, 3e-5, 0.02, 0.021, 5.0]
    counts = EventCounters()
    plain = prometheus_client.Histogram("plain", "", ["a"], buckets=BUCKETS, registry=None)
    for duration in seconds:
        counts.walked(duration)
        plain.labels("x").observe(duration)
    Exporter(CLASSES, "vllm", "at-once", 0).apply(counts.sample())
    for sample in plain.collect()[0].samples:
        labels = {name: text for name, text in sample.labels.items() if name == "le"}
        if "created" not in sample.name:
            found = value(sample.name.replace("plain", "walk_seconds"), "at-once", **labels)
            assert found == pytest.approx(sample.value)


class Foreign:
    """A histogram of another library."""

    def __init__(self, *_: object, **__: object) -> None:
        self.seen: list[float] = []

    def labels(self, *_: object) -> "Foreign":
        return self

    def observe(self, seconds: float) -> None:
        self.seen.append(seconds)


def test_another_librarys_histogram_gets_the_mean_of_the_walks() -> None:
    classes = PrometheusClasses(prometheus_client.Counter, prometheus_client.Gauge, Foreign)
    registry = prometheus_client.CollectorRegistry()

    def counter(**options: object) -> object:
        return prometheus_client.Counter(**options, registry=registry)

    def gauge(**options: object) -> object:
        return prometheus_client.Gauge(**options, registry=registry)

    exporter = Exporter(classes._replace(counter=counter, gauge=gauge), "vllm", "m", 0)
    exporter.apply({"walk_seconds|1": 2, "walk_seconds|4": 2, "walk_seconds_sum": 1.0})
    assert exporter._child("walk_seconds").seen == [0.25] * 4


def test_two_exporters_share_the_metrics_and_differ_in_labels() -> None:
    for model in ("first", "second"):
        Exporter(CLASSES, "vllm", model, 0).apply({"requests": 1})
    Exporter(CLASSES, "vllm", "first", 0).apply({"requests": 1})
    assert value("requests_total", "first") == 2
    assert value("requests_total", "second") == 1


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("statecache.engine.metrics.time.monotonic", lambda: self.now)


def test_a_reporter_exports_once_a_second_or_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, counts, taken = Clock(monkeypatch), EventCounters(), []
    reporter = Reporter(counts.sample, lambda: taken.append)
    for at in (100.0, 100.5, 100.9, 101.0, 101.5):
        clock.now = at
        counts.add("requests")
        reporter.flush()
    assert taken == [{"requests": 1}, {"requests": 3}]
    reporter.flush(force=True)
    assert taken[2:] == [{"requests": 1}]


def test_where_metrics_are_off_nothing_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked = Clock(monkeypatch), []

    def sample() -> dict[str, float]:
        raise AssertionError("sampled")

    reporter = Reporter(sample, lambda: asked.append(1))
    for at in (100.0, 200.0, 1e9):
        clock.now = at
        reporter.flush()
        reporter.flush(force=True)
    assert asked == [1]


def test_a_failure_is_logged_once_and_raises_nothing(caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def fails(*args: object) -> None:
        calls.append(args)
        raise KeyError("no such metric")

    quiet = BestEffort(fails)
    quiet(1, 2)
    quiet(3, 4)
    assert calls == [(1, 2)]
    (record,) = caplog.records
    assert record.getMessage() == "statecache: metrics failed; they are wrong from now on"
    assert "no such metric" in record.exc_text
    Reporter(lambda: {"no such": 1.0}, lambda: Exporter(CLASSES, "vllm", "m", 0).apply).flush()


def test_names_are_those_of_prometheus_and_of_the_words_in_use() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    full = {metric.full_name for metric in METRICS}
    assert {
        "statecache_active",
        "statecache_hit_tokens_total",
        "statecache_missed_by_state_tokens_total",
        "statecache_walk_seconds",
    } <= full


SHARED = """
import os, sys
import prometheus_client as p
from statecache.engine.metrics import Exporter, PrometheusClasses
classes = PrometheusClasses(p.Counter, p.Gauge, p.Histogram)
Exporter(classes, "sglang", "m", 0).apply(
    {"requests": 2, "active|gds": 1, "walk_seconds|2": 3, "walk_seconds_sum": 0.5})
"""
READ = """
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def test_processes_that_share_a_folder_add_up(tmp_path) -> None:
    shared = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for _ in range(2):
        subprocess.run([sys.executable, "-c", SHARED], check=True, env=shared)
    done = subprocess.run(
        [sys.executable, "-c", READ], check=True, env=shared, capture_output=True, text=True
    )
    found = {
        (sample.name, sample.labels.get("le")): sample.value
        for family in text_string_to_metric_families(done.stdout)
        for sample in family.samples
    }
    assert found["statecache_requests_total", None] == 4
    assert found["statecache_active", None] == 1
    assert found["statecache_walk_seconds_bucket", "2e-05"] == 0
    assert found["statecache_walk_seconds_bucket", "5e-05"] == 6
    assert found["statecache_walk_seconds_sum", None] == 1
