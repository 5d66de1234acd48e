"""The recorded workloads give the published numbers: hit rates, and totals where known."""

import pytest

from replay_support import GRID_SLOTS, needs_recorded, recorded_plan
from statecache.replay import replay

pytestmark = needs_recorded

HIT_RATES = [  # trace, slots, then dense lru, dense gds, ends lru, ends gds
    ("agent_coding", 64, 0.1814, 0.6908, 0.7477, 0.8810),
    ("agent_coding", 128, 0.3783, 0.8761, 0.8985, 0.9151),
    ("agent_coding", 256, 0.7841, 0.9205, 0.9260, 0.9241),
    ("agent_coding", 1024, 0.9360, 0.9354, 0.9261, 0.9262),
    ("conversation", 256, 0.0582, 0.1386, 0.1080, 0.1771),
    ("conversation", 1024, 0.2193, 0.2456, 0.2357, 0.2489),
]
TOTALS = [  # trace, slots, policy (dense): hit, prompt, missed-by-state tokens, evicted states
    ("agent_coding", 64, "gds", 229_773_312, 332_637_184, 82_690_048, 14_289),
    ("agent_coding", 64, "lru", 60_327_936, 332_637_184, 252_135_424, 34_743),
    ("conversation", 256, "gds", 5_508_096, 39_744_512, 7_184_896, 5_459),
]


@pytest.mark.parametrize(("trace", "slots", "a", "b", "c", "d"), HIT_RATES)
def test_hit_rates(trace: str, slots: int, a: float, b: float, c: float, d: float) -> None:
    rows = [
        replay(recorded_plan(trace, admission), policy, slots)
        for admission in ("dense", "ends")
        for policy in ("lru", "gds")
    ]
    assert [round(row.hit_tokens / row.prompt_tokens, 4) for row in rows] == [a, b, c, d]


@pytest.mark.parametrize(("policy", "rate"), [("lru", 0.9342), ("gds", 0.9284)])
def test_agent_at_384_slots(policy: str, rate: float) -> None:
    row = replay(recorded_plan("agent_coding", "dense"), policy, 384)
    assert round(row.hit_tokens / row.prompt_tokens, 4) == rate


@pytest.mark.parametrize(("trace", "slots", "policy", "hit", "prompt", "missed", "evicted"), TOTALS)
def test_exact_totals(
    trace: str, slots: int, policy: str, hit: int, prompt: int, missed: int, evicted: int
) -> None:
    row = replay(recorded_plan(trace, "dense"), policy, slots)
    assert (row.hit_tokens, row.prompt_tokens) == (hit, prompt)
    assert (row.missed_by_state_tokens, row.evicted_states) == (missed, evicted)


@pytest.mark.parametrize(("trace", "ceiling"), [("agent_coding", 0.9394), ("conversation", 0.3194)])
def test_ceilings(trace: str, ceiling: float) -> None:
    row = replay(recorded_plan(trace, "dense"), "gds", 16)
    assert round(row.resident_tokens / row.prompt_tokens, 4) == ceiling


@pytest.mark.parametrize("admission", ["dense", "ends"])
@pytest.mark.parametrize("trace", ["agent_coding", "conversation"])
def test_clairvoyant_is_at_least_as_good_everywhere(trace: str, admission: str) -> None:
    plan = recorded_plan(trace, admission)
    for slots in GRID_SLOTS:
        online = [replay(plan, policy, slots).hit_tokens for policy in ("lru", "gds")]
        assert replay(plan, "clairvoyant", slots).hit_tokens >= max(online), slots


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
    row = replay(recorded_plan(trace, "dense"), "clairvoyant", slots)
    assert row.hit_tokens / row.prompt_tokens >= at_least
