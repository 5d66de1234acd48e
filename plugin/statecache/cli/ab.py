"""The command `statecache ab`."""

from __future__ import annotations

import os
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress

from statecache.ab.arms import REPLAY, arm_engines
from statecache.ab.bench import Bench
from statecache.ab.config import check_installed
from statecache.ab.drivers.interrupts import ignore_interrupts, interrupts_put_off
from statecache.ab.experiments import EXPERIMENTS, Experiment
from statecache.ab.plans import read_plan, trial_of
from statecache.ab.report.html import report_page
from statecache.ab.report.result import (
    Machine,
    Raw,
    Result,
    comparison_table,
    failure_lines,
    git_revision,
    overstated_lines,
    rate_table,
)
from statecache.ab.statistics import compare
from statecache.cli.output import check_output, whole_file
from statecache.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from statecache.ab.results import Run
    from statecache.ab.trial import Trial

    _Advance = Callable[[str], None]

__all__ = ["ab_command"]

_SAID_SECONDS = 60
_REQUESTS, _RESULT, _PAGE = "requests.jsonl.gz", "result.json", "report.html"


def ab_command(
    plan: Annotated[
        Path | None, typer.Argument(metavar="[PLAN.toml]", help="Arms and workload in a file.")
    ] = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:KEY=VALUE,...",
            help="An arm, e.g. gds:engine=core,policy=gds,slots=256, or a live server,"
            " on:url=http://127.0.0.1:8000; the first is the baseline.",
        ),
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(
            metavar="KIND:KEY=VALUE,...",
            help="agent (sessions, turns, loop, at_once), distinct-prefixes or shared-prefix"
            " (count, rounds, prefix_tokens, own_tokens, loop, at_once), trace (file, limit, loop,"
            " at_once), or sharegpt (file, sessions, loop, at_once). loop=open asks at the times of"
            " the workload, loop=closed lets at_once sessions each ask as soon as they are"
            " answered. Default: agent.",
        ),
    ] = None,
    experiment: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"Ready-made: {', '.join(EXPERIMENTS)}.")
    ] = None,
    trace: Annotated[
        str | None, typer.Option(metavar="FILE", help="The trace of an experiment that needs one.")
    ] = None,
    engines: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help=f"Engines of an experiment: {', '.join(arm_engines())} (default: {REPLAY}; the"
            " experiment engines always compares all but that).",
        ),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(
            help="Seeds (default: 8, or as many as so many comparisons need; of an experiment as"
            " many as on all its engines)."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The first seed (default: 0).")] = None,
    warm_up: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Part of the requests not counted (default: 0.1, or the experiment's own).",
        ),
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The Python that has the engines (default: this one)."),
    ] = None,
    servers: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=VALUE,...",
            help="How servers are asked: tokens_a_block (512), output_tokens (128 at most),"
            " request_seconds (600), one_at_a_time (false: all launched servers are up at once;"
            " true: each is started for each of its runs), answers_in_prompts (true: in a closed"
            " loop), salt.",
        ),
    ] = None,
    speed: Annotated[
        float | None,
        typer.Option(metavar="X", help="Open loop of servers: X times as fast as the workload."),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where results go.")
    ] = Path("statecache-ab"),
) -> None:
    """Compare arms on a workload: which is better, by how much, and can one tell?"""
    check_installed("jinja2", "matplotlib", "scipy")
    if experiment is not None:
        if plan or arm or workload or servers or speed:
            raise SettingsError("--experiment: brings its arms and workload: leave out yours")
        asked = Experiment(experiment, engines, trace)
        share = asked.warm_up if warm_up is None else warm_up
        seeds = asked.repeats if repeats is None else repeats
        trial = trial_of(asked.cells(), asked.name, seeds, seed, share, python, asked.axis)
        trial = msgspec.structs.replace(trial, notes=asked.notes)
    else:
        if trace is not None or engines is not None:
            raise SettingsError("--trace and --engines are for --experiment: see --workload, --arm")
        trial = read_plan(plan, arm or [], workload, repeats, seed, warm_up, python, servers, speed)
    with _output_folder(output):
        _run(trial, output)


def _run(trial: Trial, folder: Path) -> None:
    for name in (_REQUESTS, _RESULT, _PAGE):
        check_output("--output", folder / name)
    for workload in {cell.workload for cell in trial.cells if cell.workload.file is not None}:
        workload.trace(trial.seed)  # a bad trace is said before an engine starts
    runs: list[Run] = []
    ended: BaseException | None = None
    bench = Bench(trial, folder, _say)
    with (
        bench,
        whole_file("--output", folder / _REQUESTS) as file,
        Raw.packed(file) as raw,
        _progress(trial) as advance,
    ):
        try:
            for run, measured in bench.runs():
                with interrupts_put_off():  # written whole and counted, or neither
                    raw.add(run, measured)
                    runs.append(run)
                advance(run.cell)
        except BaseException as error:  # also a fault: what was measured is kept
            ended = error
        finally:
            ignore_interrupts()
    result = Result(
        revision=git_revision(),
        engines=bench.versions,
        machine=Machine.here(),
        settings=trial.without_keys(),
        seeds={c.name: trial.seeds(c) if c.seeded else None for c in trial.cells},
        complete=ended is None,
        runs=runs,
        comparisons=compare(trial.pairs, runs, trial.seed),
        failures=bench.failures,
    )
    for name, content in ((_RESULT, result.to_json()), (_PAGE, report_page(result))):
        with whole_file("--output", folder / name) as file:
            file.write(content)
    _show(result, folder)
    if ended is not None:
        raise ended
    if not runs:
        raise SettingsError("no arm could be played")


def _show(result: Result, folder: Path) -> None:
    console = Console(width=1_000, color_system="auto" if sys.stdout.isatty() else None)
    console.print(comparison_table(result.comparisons))
    if len(result.settings.cells) > 1:
        console.print(rate_table(result.settings, result.runs))
    for line in [*failure_lines(result.failures), *overstated_lines(result.runs)]:
        sys.stderr.write(f"statecache: {line}\n")
    if not result.complete:
        sys.stderr.write(f"statecache: interrupted after {len(result.runs)} runs\n")
    sys.stderr.write(f"Results: {folder / _RESULT}, {folder / _REQUESTS}, {folder / _PAGE}\n")


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


@contextmanager
def _output_folder(folder: Path) -> Iterator[None]:
    """Create `folder`; after an error what was created goes, unless something was put there."""
    created = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(f"--output: {folder} cannot be made ({error.strerror})") from error
        yield
    except BaseException:
        for path in created:
            with suppress(OSError):
                path.rmdir()
        raise


@contextmanager
def _progress(trial: Trial) -> Iterator[_Advance]:
    if sys.stderr.isatty():
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(trial.name, total=trial.runs)
            yield lambda cell: progress.update(task, advance=1, description=cell)
    else:
        yield _log_lines(trial)


def _log_lines(trial: Trial) -> _Advance:
    """Return what writes a line each time a cell has all its runs, and one a minute."""
    left = {cell.name: len(cell.arms) * len(trial.seeds(cell)) for cell in trial.cells}
    started = said = time.monotonic()
    done = 0

    def advance(cell: str) -> None:
        nonlocal done, said
        done += 1
        left[cell] -= 1
        if left[cell] == 0 or time.monotonic() - said >= _SAID_SECONDS:
            said = time.monotonic()
            spent = time.monotonic() - started
            rest = spent / done * (trial.runs - done)
            sys.stderr.write(
                f"{cell}: {done} of {trial.runs} runs in {spent:.0f} s, about {rest:.0f} s left\n"
            )

    return advance
