"""The table that says whether `learned` may be the default: its arms, its numbers, its verdict."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from bench.default_policy_table import POLICY, Row, policies, summary, with_each_policy
from statecache.ab.arms import Arm
from statecache.ab.experiments import Experiment
from support.replay_support import write_trace

SCRIPT = Path(__file__).parents[2] / "bench" / "default_policy_table.py"


def row_of(learned: float) -> Row:
    return Row("e", "c", "core", "native", {"lru": [0.5], "gds": [0.7], "learned": [learned]})


def test_the_difference_is_that_of_the_means_to_the_better_of_the_others() -> None:
    """Means .6, .7 and .65: .05 below gds, though above the better of the two at the first seed."""
    rates = {"lru": [0.4, 0.8], "gds": [0.6, 0.8], "learned": [0.7, 0.6]}
    row = Row("e", "c", "core", "native", rates)
    assert row.above == pytest.approx(-0.05)
    assert row.line(tuned=False) == (
        "| e | c | core | native | 2 | 0.6000 | 0.7000 | 0.6500 | **-0.0500** |\n"
    )


def test_cells_below_and_those_not_played_fail_and_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert summary([row_of(0.7), row_of(0.699)], []) == 0
    assert summary([row_of(0.7)], ["e, c, core|native|lru: it ended"]) == 1
    capsys.readouterr()
    assert summary([row_of(0.75), row_of(0.697), row_of(0.69)], []) == 1
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[0] == "3 cells, 2 of them below -0.002."
    assert lines[1].startswith("The worst: ")
    assert [line.rsplit("|", 2)[1] for line in lines[1:]] == [
        " **-0.0100** ",
        " **-0.0100** ",
        " **-0.0030** ",
    ]


def test_what_is_tuned_counts_by_its_best() -> None:
    """.7 is level with gds and .05 below the better of two settings; without them, it is level."""
    row = msgspec.structs.replace(row_of(0.7), tuned={"cap 1": [0.75], "cap 3": [0.6]})
    assert (row.above, row.above_tuned) == (pytest.approx(0), pytest.approx(-0.05))
    assert row.line(tuned=True).endswith(" | +0.0000 | cap 1: 0.7500 | **-0.0500** |\n")
    assert row_of(0.7).line(tuned=True).endswith(" | +0.0000 |  |  |\n")
    assert [summary([row], []), summary([row_of(0.7)], [])] == [1, 0]


def test_tuned_settings_are_played_in_the_pool_they_are_of() -> None:
    cell = with_each_policy(Experiment("tuned").cells()[0], ["sglang"], tuned=True)
    assert {
        (arm.pool, arm.states_per_path, arm.policy)
        for arm in cell.arms
        if isinstance(arm, Arm) and arm.name.split("|")[2] not in policies()
    } == {(pool, states, "stock") for pool in ("native", "int8") for states in (1, 3, 8)}
    assert all(arm.name.split("|")[1] == arm.pool for arm in cell.arms if isinstance(arm, Arm))


def test_each_place_where_states_have_slots_is_played_by_each_policy() -> None:
    """Of `engines`: SGLang's slots and either int8 pool; no limit on states, and no shared pool."""
    cell = with_each_policy(Experiment("engines").cells()[0], ["sglang", "vllm"], "python9")
    assert [arm.name for arm in cell.arms] == [
        f"{place}|{policy}"
        for place in ("sglang|native", "sglang|int8", "vllm|int8")
        for policy in policies()
    ]
    assert {arm.python for arm in cell.arms} == {"python9"}
    assert POLICY in policies()


def test_a_part_of_it_is_played_and_written(tmp_path: Path) -> None:
    """With 32 slots or more each policy keeps all: 2 of 3 blocks of the second prompt are hit."""
    trace = write_trace(tmp_path / "t.jsonl", [[1, 2], [1, 2, 3]])
    more = ["--experiment", "agent-traces", "--engine", "core", "--trace", str(trace)]
    done = subprocess.run(
        [sys.executable, SCRIPT, *more, "--json", "t.json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "6 cells, 0 of them below -0.002." in done.stdout
    table = json.loads((tmp_path / "t.json").read_bytes())
    assert table["schema"] == "statecache.default-policy/1"
    assert [(row["cell"], row["engine"], row["pool"]) for row in table["rows"]] == [
        (f"{slots} slots", "core", "native") for slots in (32, 64, 128, 256, 384, 1024)
    ]
    for row in table["rows"]:
        assert row["rates"] == {policy: [2 / 5] for policy in ("lru", "gds", "learned")}
