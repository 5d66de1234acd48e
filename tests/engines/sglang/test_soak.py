"""Long traffic through SGLang's real cache layer under pressure: flat memory, no drift.

`make soak` runs this file for long; as a test it takes some seconds.
"""

import math
import sys

import pytest
from arrivals import Arrivals
from cache_layer import Traffic, plugin
from host_layer import HostTraffic
from random_traffic import host_operations, operations, perform

from support import soak

GDS = {"policy": "gds"}
KINDS = {
    "python core": ("python", GDS, {}),
    "rust core": ("rust", GDS, {}),
    "rust core, int8": ("rust", {**GDS, "int8": True, "int8_slots": 16}, {}),
    "python core, learned": ("python", {"policy": "learned"}, {}),
    "rust core, host": ("rust", GDS, {"write": "write_through", "ratio": 0.4}),
}
SIZES = {"slots": 16, "kv_tokens": 900}
# Requests that wait for one another, as SGLang schedules them.
SCHEDULED = {
    "bursts of siblings": ("rust", {**GDS, "admission": "branch-points"}, {}),
    "bursts of siblings, overlap": ("python", {"policy": "learned"}, {"overlap": True}),
    "bursts of siblings, few slots": ("rust", GDS, {"slots": 26, "kv_tokens": 9_000}),
}


def run(kind: str, requests: int, seconds: float, every: int = 1_000) -> soak.Report:
    """`Traffic.check`: cached + free = total in both pools, the index knows the tree's states."""
    core, settings, host = KINDS[kind]
    cache, asked = (HostTraffic, host_operations) if host else (Traffic, operations)
    with plugin(**settings):
        traffic = cache(core, **host, **SIZES)
        served = 0

        def steps():
            nonlocal served
            for operation in asked(1, sys.maxsize):
                perform(traffic, operation)
                served += operation[0] in ("run", "abort")
                yield

        report = soak.soak(
            f"SGLang, {kind}",
            steps(),
            lambda: served,
            traffic.check,
            requests=requests,
            seconds=seconds,
            every=every,
        )
        assert traffic.core.scheduler_side.faults.active
        numbers = traffic.core.scheduler_side.counts.numbers
        chosen = "evictions|to_host" if host else "evictions|policy"
        assert numbers[chosen] > report.requests / 20
    return report


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_flat_and_nothing_drifts(kind):
    report = run(kind, 800, math.inf, every=25)
    assert report.checks >= 2
    assert report.growth_mib < report.most_growth_mib


def run_scheduled(kind: str, requests: int, seconds: float, every: int = 1_000) -> soak.Report:
    """No request waits while nothing runs, each one ends, and then nothing is held."""
    core, settings, sizes = SCHEDULED[kind]
    with plugin(**settings):
        traffic = Arrivals(core, 1, **{"slots": 60, "kv_tokens": 20_000, **sizes})
        report = soak.soak(
            f"SGLang, {kind}",
            traffic.steps(),
            lambda: traffic.arrived,
            traffic.drain,
            requests=requests,
            seconds=seconds,
            every=every,
        )
        side = traffic.run.traffic.core.scheduler_side
        assert side.faults.active
        numbers = side.counts.numbers
        assert numbers["head_wait_steps"] >= numbers["head_waits"] > traffic.arrived / 20
        assert numbers["head_wait_saved_tokens"] > 8 * numbers["head_waits"] / 2
        assert traffic.aborted > traffic.arrived / 50
    return report


@pytest.mark.parametrize("kind", SCHEDULED)
def test_no_deadlock_in_random_arrivals(kind):
    assert run_scheduled(kind, 300, math.inf, every=25).checks >= 2


if __name__ == "__main__":
    soak.main(
        [*KINDS, *SCHEDULED],
        lambda kind, *limits: (run if kind in KINDS else run_scheduled)(kind, *limits),
    )
