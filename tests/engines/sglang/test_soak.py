"""Long traffic through SGLang's real cache layer under pressure: flat memory, no drift.

`make soak` runs this file for long; as a test it takes some seconds.
"""

import math
import sys

import pytest
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


if __name__ == "__main__":
    soak.main(KINDS, run)
