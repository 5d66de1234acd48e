"""The table of hit rates: arms by cells, means over seeds."""

import io

from rich.console import Console

from statecache.ab.arms import Arm
from statecache.ab.report.result import rate_table
from statecache.ab.results import Run
from statecache.ab.trial import Cell, Trial
from statecache.ab.workloads import Workload


def run_of(cell: str, arm: str, seed: int, hit: int | None) -> Run:
    return Run(
        cell=cell,
        arm=arm,
        seed=seed,
        warm_up=0,
        requests=1,
        rejected=0,
        prompt_tokens=1_000,
        hit_tokens=hit,
        resident_tokens=None,
        missed_by_state_tokens=None,
        recompute_cost=None,
        evicted_states=None,
        skipped_states=None,
    )


def test_a_row_an_arm_and_a_column_a_cell_of_means_over_seeds() -> None:
    """250 and 300 of 1,000 tokens are .2750; an arm that was not played, or told nothing: "-"."""
    cells = [
        Cell(name=name, workload=Workload(), arms=[Arm(name="a"), Arm(name="b")])
        for name in ("8 slots", "16 slots")
    ]
    runs = [
        run_of("8 slots", "a", 0, 250),
        run_of("8 slots", "a", 1, 300),
        run_of("16 slots", "a", 0, 1_000),
        run_of("8 slots", "b", 0, None),
    ]
    console = Console(file=io.StringIO(), width=200)
    console.print(rate_table(Trial(name="t", cells=cells, repeats=2), runs))
    lines = [line.strip() for line in console.file.getvalue().splitlines() if line.strip()]  # type: ignore[attr-defined]
    rows = [[part.strip() for part in line.strip("|").split("|")] for line in lines]
    assert set("".join(rows.pop(1))) == {"-"}
    assert rows == [
        ["token hit rate", "8 slots", "16 slots"],
        ["a", "0.2750", "1.0000"],
        ["b", "-", "-"],
    ]
