"""Compare `learned` with the better of lru and gds wherever an engine's states have slots.

    python tests/bench/default_policy_table.py --trace TRACE --python ENGINES_PYTHON [--tuned]

Plays the workloads and sizes of the ready-made experiments of `statecache ab` with every policy: in
each cell the token hit rates, and what `learned` is above the better of the other two. With --tuned
also what it is above the best of the engine alone as its users tune it, in the same pool. TRACE is
a recorded trace, for the experiments that play one; without it they are left out, or that part of
them. Exit code 1 when `learned` is more than 0.002 below in a cell, or a cell could not be played.
"""

import argparse
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from statistics import fmean as mean
from typing import Any

import msgspec

from statecache.ab.arms import REPLAY, Arm, arm_engines, policies_of
from statecache.ab.bench import Bench
from statecache.ab.experiments import EXPERIMENTS, Experiment, engines_of
from statecache.ab.report.result import Machine, git_revision
from statecache.ab.results import MEASURES
from statecache.ab.trial import Cell, Trial
from statecache.engine.spec import engines as engine_specs
from statecache.errors import SettingsError

NAMES = ("sessions", "agent-traces", "one-pool", "engines", "tuned")
POLICY = "learned"
TOLERANCE = 0.002
SEEDS = 12


class Row(msgspec.Struct, frozen=True):
    """A cell of one engine and pool: the hit rate at each seed, by policy and by tuned setting."""

    experiment: str
    cell: str
    engine: str
    pool: str
    rates: dict[str, list[float]]
    tuned: dict[str, list[float]] = {}

    @property
    def above(self) -> float:
        """How far `learned` is above the better of the other policies."""
        others = [mean(rates) for policy, rates in self.rates.items() if policy != POLICY]
        return mean(self.rates[POLICY]) - max(others)

    @property
    def above_tuned(self) -> float | None:
        """How far it is above the best of the engine alone; None where that was not played."""
        best = max(map(mean, self.tuned.values()), default=None)
        return None if best is None else mean(self.rates[POLICY]) - best

    @property
    def lowest(self) -> float:
        return self.above if self.above_tuned is None else min(self.above, self.above_tuned)

    def line(self, *, tuned: bool) -> str:
        shown = [
            self.experiment,
            self.cell,
            self.engine,
            self.pool,
            str(len(self.rates[POLICY])),
            *(f"{mean(rates):.4f}" for rates in self.rates.values()),
            difference_text(self.above),
        ]
        if tuned:
            best = max(self.tuned, key=lambda title: mean(self.tuned[title]), default=None)
            shown.append("" if best is None else f"{best}: {mean(self.tuned[best]):.4f}")
            shown.append("" if self.above_tuned is None else difference_text(self.above_tuned))
        return f"| {' | '.join(shown)} |\n"


def heading(*, tuned: bool) -> str:
    titles = ["experiment", "cell", "engine", "pool", "seeds", *policies()]
    titles.append(f"{POLICY} above the better")
    titles += ["best of the engine alone, tuned", f"{POLICY} above it"] if tuned else []
    return f"| {' | '.join(titles)} |\n|{'---|' * 4}{'---:|' * (len(titles) - 4)}\n"


def difference_text(difference: float) -> str:
    mark = "**" if difference < -TOLERANCE else ""
    return f"{mark}{difference:+.4f}{mark}"


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON document."""

    schema: str = "statecache.default-policy/1"
    revision: str | None
    machine: Machine
    engines: dict[str, str]
    rows: list[Row]
    missing: list[str]


def policies() -> tuple[str, ...]:
    return ("lru", "gds", POLICY)


def with_each_policy(
    cell: Cell, engines: list[str], python: str | None = None, *, tuned: bool = False
) -> Cell:
    """Return the cell with an arm for each policy in the place of those it has.

    Two arms are in one place if they differ in nothing but name and policy. With `tuned` also arms
    of the engine alone as its users tune it, in the pool of the place.
    """
    places = dict.fromkeys(
        msgspec.structs.replace(arm, name="", policy=POLICY, baseline=None)
        for arm in cell.arms
        if isinstance(arm, Arm)
        and arm.engine in engines
        and not arm.states_per_path
        and set(policies()) <= set(policies_of(arm.engine, arm.pool))
    )
    arms = []
    for place in places:
        played: list[tuple[str, dict[str, Any]]] = [(name, {"policy": name}) for name in policies()]
        if tuned and place.engine != REPLAY:
            played += [
                (title, {"policy": "stock", **keys})
                for title, keys in engine_specs()[place.engine].tuned.items()
                if keys.get("pool", "native") == place.pool
            ]
        arms += [
            msgspec.structs.replace(place, name=f"{place.engine}|{place.pool}|{title}", **keys)
            for title, keys in played
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
    cells = [
        with_each_policy(cell, known, given.python, tuned=given.tuned) for cell in asked.cells()
    ]
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
            engine, pool, title = run.arm.split("|")
            rate = MEASURES[0].of(run) or 0.0
            rates.setdefault((engine, pool), {}).setdefault(title, []).append(rate)
        for (engine, pool), by_title in rates.items():
            rates_of = {title: by_title.pop(title, []) for title in policies()}
            if all(rates_of.values()):
                yield Row(trial.name, name, engine, pool, rates_of, by_title)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--experiment", action="append", choices=NAMES, help="default: all")
    parser.add_argument("--engine", action="append", choices=arm_engines(), help="default: all")
    parser.add_argument("--trace", help="a recorded trace, for the experiments that play one")
    parser.add_argument("--python", help="the Python that has the engines (default: this one)")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--tuned", action="store_true", help="also the engines alone, tuned")
    parser.add_argument("--json", type=Path, help="write the rates of each seed to this file")
    given = parser.parse_args()
    given.engine = given.engine or list(arm_engines())
    names = given.experiment or [
        name for name in NAMES if given.trace or EXPERIMENTS[name].trace != "must"
    ]
    sys.stdout.write(heading(tuned=given.tuned))
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
                sys.stdout.write(row.line(tuned=given.tuned))
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
    ordered = sorted(rows, key=lambda row: row.lowest)
    below = [row for row in ordered if row.lowest < -TOLERANCE]
    tuned = any(row.tuned for row in rows)
    sys.stdout.write(f"\n{len(rows)} cells, {len(below)} of them below -{TOLERANCE:g}.\n")
    for row in ordered[:1]:
        sys.stdout.write(f"The worst: {row.line(tuned=tuned)}")
    for row in below:
        sys.stdout.write(f"Below: {row.line(tuned=tuned)}")
    for line in missing:
        sys.stdout.write(f"Not played: {line}\n")
    return 1 if below or missing else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SettingsError as error:
        sys.exit(f"default_policy_table.py: {error}")
