"""Long traffic through SGLang's real cache layer under pressure: flat memory, no drift.

`make soak` runs this file for long; as a test it takes some seconds.
"""

import sys

import pytest
from cache_layer import Traffic, plugin
from random_traffic import operations, perform

import soak

KINDS = {
    "python core": ("python", {"policy": "gds"}),
    "rust core": ("rust", {"policy": "gds"}),
    "rust core, int8": ("rust", {"policy": "gds", "int8": True, "int8_slots": 16}),
}
SIZES = {"slots": 16, "kv_tokens": 900}


def run(kind: str, requests: int, seconds: float, every: int = 1_000) -> soak.Report:
    """`Traffic.check`: cached + free = total in both pools, the index knows the tree's states."""
    core, settings = KINDS[kind]
    with plugin(**settings):
        traffic = Traffic(core, **SIZES)
        served = 0

        def steps():
            nonlocal served
            for operation in operations(1, sys.maxsize):
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
        assert traffic.core.advisor.active
        assert traffic.core.advisor.counts.numbers["evictions|policy"] > report.requests / 20
    return report


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_flat_and_nothing_drifts(kind):
    report = run(kind, 1_500, 20, every=50)
    assert report.checks >= 2
    assert report.growth_mib < soak.MOST_GROWTH_MIB


if __name__ == "__main__":
    soak.main(KINDS, run)
