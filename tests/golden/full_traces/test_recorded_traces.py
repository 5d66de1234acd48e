"""The recorded workloads give the published numbers: hit rates, and totals where known."""

import pytest

from statecache.replay.state_slots import replay
from support.recorded import PUBLISHED, recorded_schedule

TOTALS = [  # trace, slots, policy (dense): hit, prompt, missed-by-state tokens, evicted states
    ("agent_coding", 64, "gds", 229_773_312, 332_637_184, 82_690_048, 14_289),
    ("agent_coding", 64, "lru", 60_327_936, 332_637_184, 252_135_424, 34_743),
    ("conversation", 256, "gds", 5_508_096, 39_744_512, 7_184_896, 5_459),
]


@pytest.mark.parametrize(("trace", "admission", "policy", "slots", "rate"), PUBLISHED["hit_rates"])
def test_hit_rates(trace: str, admission: str, policy: str, slots: int, rate: float) -> None:
    row = replay(recorded_schedule(trace, admission), policy, slots)
    assert round(row.hit_tokens / row.prompt_tokens, 4) == rate


@pytest.mark.parametrize(("trace", "slots", "policy", "hit", "prompt", "missed", "evicted"), TOTALS)
def test_exact_totals(
    trace: str, slots: int, policy: str, hit: int, prompt: int, missed: int, evicted: int
) -> None:
    row = replay(recorded_schedule(trace, "dense"), policy, slots)
    assert (row.hit_tokens, row.prompt_tokens) == (hit, prompt)
    assert (row.missed_by_state_tokens, row.evicted_states) == (missed, evicted)


@pytest.mark.parametrize(("trace", "ceiling"), [("agent_coding", 0.9394), ("conversation", 0.3194)])
def test_ceilings(trace: str, ceiling: float) -> None:
    row = replay(recorded_schedule(trace, "dense"), "gds", 16)
    assert round(row.resident_tokens / row.prompt_tokens, 4) == ceiling


@pytest.mark.parametrize("admission", ["dense", "ends"])
@pytest.mark.parametrize("trace", ["agent_coding", "conversation"])
def test_clairvoyant_is_at_least_as_good_everywhere(trace: str, admission: str) -> None:
    schedule = recorded_schedule(trace, admission)
    for slots in PUBLISHED["slots"]:
        online = [replay(schedule, policy, slots).hit_tokens for policy in ("lru", "gds")]
        assert replay(schedule, "clairvoyant", slots).hit_tokens >= max(online), slots


@pytest.mark.parametrize(
    ("trace", "slots", "at_least"),
    [
        ("agent_coding", 32, 0.91),
        ("agent_coding", 64, 0.9365),
        ("conversation", 64, 0.26),
        ("conversation", 256, 0.30),
    ],
)
def test_clairvoyant_reaches_what_foresight_is_known_to(
    trace: str, slots: int, at_least: float
) -> None:
    row = replay(recorded_schedule(trace, "dense"), "clairvoyant", slots)
    assert row.hit_tokens / row.prompt_tokens >= at_least
