"""The table of the recorded workload in README.md is that of the command beside it."""

from statecache.replay.state_slots import replay
from support.readme_table import table_after
from support.recorded import recorded_schedule


def test_recorded_workload() -> None:
    table = table_after("And a recorded one")
    assert len(table) == 6
    schedule = recorded_schedule("agent_coding", "dense")
    for column, policy in ((1, "lru"), (2, "gds"), (3, "learned"), (4, "clairvoyant")):
        rows = [replay(schedule, policy, int(row[0])) for row in table]
        rates = [round(row.hit_tokens / row.prompt_tokens, 4) for row in rows]
        assert rates == [row[column] for row in table]
