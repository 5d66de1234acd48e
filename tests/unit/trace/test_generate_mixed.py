"""Workloads with traits to choose: what each trait makes of a trace."""

import json
from itertools import pairwise

import pytest

from statecache.errors import SettingsError
from statecache.trace.generate_mixed import CHOICES, MixedWorkload, drawn_workload, mixed_lines


def lines_of(**settings: object) -> list[dict]:
    workload = MixedWorkload(requests=300, sessions=20, **settings)  # type: ignore[arg-type]
    return [json.loads(line) for line in mixed_lines(workload)]


@pytest.mark.parametrize("choice", CHOICES)
def test_the_same_settings_give_the_same_lines(choice: str) -> None:
    lines = lines_of(choice=choice, seed=4, subagents=2)
    assert len(lines) == 300
    assert lines[0]["seed"] == 4
    assert lines == lines_of(choice=choice, seed=4, subagents=2)
    assert lines != lines_of(choice=choice, seed=5, subagents=2)
    assert all(line["input_length"] == 512 * len(line["hash_ids"]) for line in lines)


def test_a_cycle_asks_each_session_in_turn() -> None:
    assert [line["session_id"] for line in lines_of(choice="cycle")] == [*range(20)] * 15


def test_zipf_prefers_the_first_sessions() -> None:
    places = [line["session_id"] for line in lines_of(choice="zipf")]
    assert places.count(0) > 3 * max(places.count(19), 1)


def test_bursts_stay_with_a_session() -> None:
    places = [line["session_id"] for line in lines_of(choice="bursts")]
    assert sum(a == b for a, b in pairwise(places)) > 150


def test_without_rewinds_and_restarts_prompts_only_grow() -> None:
    last: dict[int, list[int]] = {}
    for line in lines_of(choice="cycle", rewinds=0.0, restarts=0.0, most_blocks=10_000):
        before = last.get(line["session_id"], [])
        assert line["hash_ids"][: len(before)] == before
        last[line["session_id"]] = line["hash_ids"]


def test_after_a_change_of_phase_the_sessions_are_others() -> None:
    lines = lines_of(phase="cycle", choice="cycle", restarts=0.0)
    before = {block for line in lines[:150] for block in line["hash_ids"]}
    after = {block for line in lines[150:] for block in line["hash_ids"]}
    assert not before & after


def test_a_seed_draws_one_workload() -> None:
    assert drawn_workload(7) == drawn_workload(7)
    assert len({drawn_workload(seed).choice for seed in range(40)}) == len(CHOICES)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"requests": 0}, "requests is 0"),
        ({"prompts": 6}, "prompts is 6"),
        ({"subagents": -1}, "subagents is -1"),
        ({"rewinds": 1.5}, "rewinds is 1.5"),
        ({"choice": "fair"}, "choice is 'fair'"),
        ({"phase": "fair"}, "phase is 'fair'"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_settings_out_of_range_are_named(wrong: dict[str, object], problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        MixedWorkload(**wrong)  # type: ignore[arg-type]
