"""Compare `learned` with the better of lru and gds wherever an engine's states have slots.

    python tests/bench/default_policy_table.py --trace TRACE --python ENGINES_PYTHON

Plays the workloads and sizes of the ready-made experiments of `statecache ab` with every policy: in
each cell the token hit rates, and what `learned` is above the better of the other two. TRACE is a
recorded trace, for the experiments that play one; without it they are left out, or that part of
them. Exit code 1 when `learned` is more than 0.002 below in a cell, or a cell could not be played.
"""

import argparse
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import msgspec

from statecache.ab.arms import Arm, arm_engines, policies_of
from statecache.ab.bench import Bench
from statecache.ab.experiments import EXPERIMENTS, Experiment, engines_of
from statecache.ab.report.result import Machine, git_revision
from statecache.ab.results import MEASURES
from statecache.ab.trial import Cell, Trial
from statecache.errors import SettingsError
from statecache.index.policies import ENGINE, policy_names

NAMES = ("sessions", "agent-traces", "one-pool", "engines", "tuned")
POLICY = "learned"
TOLERANCE = 0.002
SEEDS = 12


class Row(msgspec.Struct, frozen=True):
    """A cell of one engine and pool: the hit rate of each policy at each seed."""

    experiment: str
    cell: str
    engine: str
    pool: str
    rates: dict[str, list[float]]

    @property
    def means(self) -> dict[str, float]:
        return {policy: sum(rates) / len(rates) for policy, rates in self.rates.items()}

    @property
    def seeds(self) -> int:
        return len(self.rates[POLICY])

    @property
    def above(self) -> float:
        means = self.means
        return means.pop(POLICY) - max(means.values())

    def line(self) -> str:
        shown = " | ".join(f"{rate:.4f}" for rate in self.means.values())
        where = f"{self.experiment} | {self.cell} | {self.engine} | {self.pool}"
        mark = "**" if self.above < -TOLERANCE else ""
        return f"| {where} | {self.seeds} | {shown} | {mark}{self.above:+.4f}{mark} |\n"


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON document."""

    schema: str = "statecache.default-policy/1"
    revision: str | None
    machine: Machine
    engines: dict[str, str]
    rows: list[Row]
    missing: list[str]


def policies() -> tuple[str, ...]:
    return policy_names(ENGINE)


def with_each_policy(cell: Cell, engines: list[str], python: str | None) -> Cell:
    """Return the cell with an arm for each policy in the place of those it has.

    Two arms are in one place if they differ in nothing but name and policy.
    """
    places = dict.fromkeys(
        msgspec.structs.replace(arm, name="", policy=POLICY, baseline=None)
        for arm in cell.arms
        if isinstance(arm, Arm)
        and arm.engine in engines
        and not arm.states_per_path
        and set(policies()) <= set(policies_of(arm.engine, arm.pool))
    )
    arms = [
        msgspec.structs.replace(place, name=f"{place.engine}|{place.pool}|{policy}", policy=policy)
        for place in places
        for policy in policies()
    ]
    if python is not None:
        arms = [arm.with_python(python) for arm in arms]
    return msgspec.structs.replace(cell, arms=arms)


def trial_of(name: str, given: argparse.Namespace) -> Trial | None:
    """Return an experiment with each policy; None where nothing of it is left."""
    known = [engine for engine in engines_of(name) if engine in given.engine]
    if not known:
        return None
    engines = engines_of(name) if EXPERIMENTS[name].compares else known
    trace = None if EXPERIMENTS[name].trace == "none" else given.trace
    asked = Experiment(name, ",".join(engines), trace)
    cells = [with_each_policy(cell, known, given.python) for cell in asked.cells()]
    return Trial(
        name=name,
        cells=[cell for cell in cells if cell.arms],
        repeats=given.seeds,
        seed=given.seed,
        warm_up=asked.warm_up,
    )


def rows_of(trial: Trial, bench: Bench) -> Iterator[Row]:
    """Play the test; yield the rows of a cell once all its seeds were played."""
    for name, played in groupby(bench.runs(), lambda run: run[0].cell):
        rates: dict[tuple[str, str], dict[str, list[float]]] = {}
        for run, _ in played:
            engine, pool, policy = run.arm.split("|")
            rate = MEASURES[0].of(run) or 0.0
            rates.setdefault((engine, pool), {}).setdefault(policy, []).append(rate)
        for (engine, pool), by_policy in rates.items():
            if set(by_policy) == set(policies()):
                yield Row(trial.name, name, engine, pool, by_policy)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--experiment", action="append", choices=NAMES, help="default: all")
    parser.add_argument("--engine", action="append", choices=arm_engines(), help="default: all")
    parser.add_argument("--trace", help="a recorded trace, for the experiments that play one")
    parser.add_argument("--python", help="the Python that has the engines (default: this one)")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--json", type=Path, help="write the rates of each seed to this file")
    given = parser.parse_args()
    given.engine = given.engine or list(arm_engines())
    names = given.experiment or [
        name for name in NAMES if given.trace or EXPERIMENTS[name].trace != "must"
    ]
    titles = " | ".join(policies())
    sys.stdout.write(
        f"| experiment | cell | engine | pool | seeds | {titles} | {POLICY} above the better |\n"
        f"|---|---|---|---|---:|{'---:|' * len(policies())}---:|\n"
    )
    rows: list[Row] = []
    missing: list[str] = []
    versions: dict[str, str] = {}
    for name in names:
        trial = trial_of(name, given)
        if trial is None:
            continue
        with Bench(trial) as bench:
            versions |= bench.versions
            for row in rows_of(trial, bench):
                rows.append(row)
                sys.stdout.write(row.line())
                sys.stdout.flush()
            missing += [f"{name}, {f.cell}, {f.arm}: {f.reason}" for f in bench.failures]
        if given.json is not None:
            table = Table(
                revision=git_revision(),
                machine=Machine.here(),
                engines=versions,
                rows=rows,
                missing=missing,
            )
            given.json.write_bytes(msgspec.json.format(msgspec.json.encode(table)) + b"\n")
    return summary(rows, missing)


def summary(rows: list[Row], missing: list[str]) -> int:
    """Say which cells are below, and the worst; return the exit code."""
    below = sorted((row for row in rows if row.above < -TOLERANCE), key=lambda row: row.above)
    sys.stdout.write(f"\n{len(rows)} cells, {len(below)} of them below -{TOLERANCE:g}.\n")
    if rows:
        sys.stdout.write(f"The worst: {min(rows, key=lambda row: row.above).line()}")
    for row in below:
        sys.stdout.write(f"Below: {row.line()}")
    for line in missing:
        sys.stdout.write(f"Not played: {line}\n")
    return 1 if below or missing else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SettingsError as error:
        sys.exit(f"default_policy_table.py: {error}")
