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
from sglang.srt.runtime_context import get_parallel
from speculative_chats import Chats
from speculative_parts import build, speculating

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
# A drafter: SGLang's core, how it keeps states, the plugin's settings, and whether steps are mixed.
_INT8 = {"policy": "gds", "checkpoints": "int8", "checkpoint_slots": 24}
SPECULATIVE = {
    "drafter, no_buffer": ("rust", "no_buffer", GDS, {"mixed": True}),
    "drafter, no_buffer, python core": ("python", "no_buffer", GDS, {}),
    "drafter, extra_buffer": ("rust", "extra_buffer", GDS, {"page": 64}),
    "drafter, extra_buffer, python core": ("python", "extra_buffer", {"policy": "learned"}, {}),
    "drafter, extra_buffer, int8": ("rust", "extra_buffer", _INT8, {"page": 64}),
    "drafter, extra_buffer_lazy": (
        "rust",
        "extra_buffer_lazy",
        {"policy": "learned"},
        {"mixed": True},
    ),
    "drafter, no_buffer, int8": ("rust", "no_buffer", _INT8, {"mixed": True}),
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
    report = run(kind, 400, math.inf, every=25)
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


def run_speculative(kind: str, requests: int, seconds: float, every: int = 1_000) -> soak.Report:
    """No state is reused by tokens that are not its own, through stops, aborts and retractions."""
    core, buffer, settings, more = SPECULATIVE[kind]
    with plugin(**settings):
        traffic = build(core, buffer, more.get("page", 1))
        with speculating(buffer):
            chats = Chats(traffic, 1, mixed=more.get("mixed", False))
            report = soak.soak(
                f"SGLang, {kind}",
                chats.steps(),
                lambda: chats.asked,
                chats.drain,
                requests=requests,
                seconds=seconds,
                every=every,
            )
        side = traffic.core.scheduler_side
        assert side.faults.active
        assert side.counts.numbers["draft_tokens"] == chats.run.drafted
        assert chats.aborted > 0
        assert chats.run.retracted > 0
        seen = f"{chats.run.compared:,} states compared, {chats.run.wrong} wrong"
    return report._replace(name=f"{report.name} ({seen})")


@pytest.mark.parametrize("kind", SPECULATIVE)
def test_nothing_drifts_with_a_drafter(kind):
    assert run_speculative(kind, 150, math.inf, every=25).checks >= 2


RUNS = dict.fromkeys(KINDS, run)
RUNS |= dict.fromkeys(SCHEDULED, run_scheduled) | dict.fromkeys(SPECULATIVE, run_speculative)

if __name__ == "__main__":
    with get_parallel().override(attn_tp_rank=0):  # whose process reports the metrics
        soak.main(RUNS, lambda kind, *limits: RUNS[kind](kind, *limits))
