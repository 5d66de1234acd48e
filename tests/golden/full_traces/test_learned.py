"""`learned` gives the published rates on the recorded traces; the whole table is a benchmark."""

import pytest

from statecache.replay.state_slots import replay
from support.recorded import PUBLISHED, recorded_schedule

CHEAP = {
    name: rate
    for name, rate in PUBLISHED["learned"].items()
    if not name.startswith("conv") or "3000" in name
}


@pytest.mark.parametrize(("name", "rate"), CHEAP.items())
def test_published_rates(name: str, rate: float) -> None:
    trace, _, admission, slots = name.split(",")
    row = replay(recorded_schedule(trace, admission), "learned", int(slots))
    assert row.hit_tokens / row.prompt_tokens > rate - 0.002


@pytest.mark.parametrize(
    ("trace", "admission", "slots"),
    [("agent_coding", "dense", 384), ("agent_coding", "ends", 256), ("conversation", "ends", 1024)],
)
def test_no_worse_than_the_better_of_lru_and_gds(trace: str, admission: str, slots: int) -> None:
    schedule = recorded_schedule(trace, admission)
    lru, gds, learned = (replay(schedule, policy, slots) for policy in ("lru", "gds", "learned"))
    lost = max(lru.hit_tokens, gds.hit_tokens) - learned.hit_tokens
    assert lost <= 0.002 * learned.prompt_tokens
