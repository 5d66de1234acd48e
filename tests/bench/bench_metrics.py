"""Cost of one metric event, and of the report once a second. The command is in README.md here.

A round is 100 events, so a median in microseconds is a cost in hundredths of a microsecond.
"""

import prometheus_client
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from statecache.engine.metrics import EventCounters, Exporter, MetricDeltas, PrometheusClasses

BATCH, ROUNDS = 100, 200
EVENTS = {
    "add": lambda counts: counts.add("evictions|policy"),
    "walked": lambda counts: counts.walked(3e-4),
    "admitted": lambda counts: counts.admitted(70_000, 60_000, 65_000),
}


@pytest.mark.parametrize("event", EVENTS)
def test_event(benchmark: BenchmarkFixture, event: str) -> None:
    counts, call = EventCounters(), EVENTS[event]

    def batch() -> None:
        for _ in range(BATCH):
            call(counts)

    benchmark.pedantic(batch, rounds=ROUNDS, warmup_rounds=10)


def test_report(benchmark: BenchmarkFixture) -> None:
    """Once a second: one round is one report in which every kind of number has changed."""
    counts, changes = EventCounters(), MetricDeltas()
    classes = PrometheusClasses(
        prometheus_client.Counter, prometheus_client.Gauge, prometheus_client.Histogram
    )
    exporter = Exporter(classes, "sglang", "bench", 0)

    def report() -> None:
        for call in EVENTS.values():
            call(counts)
        exporter.apply(changes.of(counts.sample()))

    benchmark.pedantic(report, rounds=ROUNDS, warmup_rounds=10)
