"""What a test found: the document for programs, the table for people, and the raw requests."""

from __future__ import annotations

import gzip
import math
import os
import platform
import subprocess
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec
from rich import box
from rich.table import Table

from statecache import __version__
from statecache.ab.results import MEASURES, Run
from statecache.ab.statistics import Comparison
from statecache.ab.trial import Failure, Trial

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from statecache.ab.drivers.base import Measured

__all__ = [
    "Machine",
    "Raw",
    "Result",
    "comparison_table",
    "failure_lines",
    "git_revision",
    "interval_of",
    "number_text",
    "overstated_lines",
    "rate_table",
]


class Machine(msgspec.Struct, frozen=True):
    """Where a test ran."""

    system: str
    processor: str
    cores: int
    python: str

    @classmethod
    def here(cls) -> Machine:
        """Describe this machine."""
        return cls(
            f"{platform.system()} {platform.release()}",
            _processor() or platform.machine(),
            os.cpu_count() or 1,
            platform.python_version(),
        )


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON document. Nothing in it depends on the clock: the same test gives the same bytes.

    `complete` is false where the test was interrupted: `runs` are those that had ended.
    """

    schema: str = "statecache.ab/1"
    version: str = __version__
    revision: str | None
    engines: dict[str, str]
    machine: Machine
    settings: Trial
    seeds: dict[str, list[int] | None]
    complete: bool
    runs: Sequence[Run]
    comparisons: Sequence[Comparison]
    failures: Sequence[Failure]

    def to_json(self) -> bytes:
        """Return the document, indented and ending in a newline."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


class Raw:
    """Writes one line a request: cell, arm, seed, number, and what was measured of it."""

    def __init__(self, file: IO[bytes] | gzip.GzipFile) -> None:
        self._file = file

    @classmethod
    @contextmanager
    def packed(cls, file: IO[bytes]) -> Iterator[Raw]:
        """Write to `file` compressed; the same requests, the same bytes."""
        with gzip.GzipFile(
            filename="", mode="wb", fileobj=file, mtime=0, compresslevel=3
        ) as packed:
            yield cls(packed)

    def add(self, run: Run, measured: Measured) -> None:
        """Write the requests of a run."""
        lines = bytearray()
        for number, row in enumerate(measured.rows()):
            line = {
                "cell": run.cell,
                "arm": run.arm,
                "seed": run.seed,
                "request": number,
                "warm_up": number < run.warm_up,
                **row,
            }
            lines += msgspec.json.encode(line) + b"\n"
        self._file.write(lines)


def git_revision() -> str | None:
    """Return the commit of this project's repository if this is run inside it, else None."""
    with suppress(OSError, subprocess.SubprocessError):
        if (Path(_git("rev-parse", "--show-toplevel")) / "plugin" / "statecache" / "ab").is_dir():
            return _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    return None


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    found = subprocess.run(command, capture_output=True, timeout=10, check=True)  # noqa: S603
    return found.stdout.decode().strip()


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    """Lay out one row a comparison; differences are arm less baseline with a 95 % interval."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("cell", "measure", "baseline", "arm"):
        table.add_column(heading, overflow="fold")
    for heading in ("of baseline", "of arm", "difference", "95 % interval", "p"):
        table.add_column(heading, justify="right", overflow="fold")
    table.add_column("verdict")
    for comparison in comparisons:
        style = {"better": "green", "worse": "red"}.get(comparison.verdict)
        table.add_row(
            comparison.cell,
            comparison.measure,
            comparison.baseline,
            comparison.arm,
            number_text(comparison.baseline_mean),
            number_text(comparison.arm_mean),
            number_text(comparison.difference, sign=True),
            interval_of(comparison),
            "-" if comparison.p is None else f"{comparison.p:.4f}",
            comparison.verdict,
            style=style,
        )
    return table


def rate_table(trial: Trial, runs: Sequence[Run]) -> Table:
    """Lay out the token hit rate of each arm, a row, in each cell, a column: means over seeds.

    As Markdown, for a page of results; "-" is what was not played or not measured.
    """
    rates: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        if (rate := MEASURES[0].of(run)) is not None:
            rates.setdefault((run.arm, run.cell), []).append(rate)
    table = Table("token hit rate", box=box.MARKDOWN)
    for cell in trial.cells:
        table.add_column(cell.name, justify="right", overflow="fold")
    for arm in dict.fromkeys(arm.name for cell in trial.cells for arm in cell.arms):
        found = [rates.get((arm, cell.name), []) for cell in trial.cells]
        means = [f"{math.fsum(of) / len(of):.4f}" if of else "-" for of in found]
        table.add_row(arm, *means)
    return table


def interval_of(comparison: Comparison) -> str:
    """Write the interval of a comparison."""
    if comparison.low is None or comparison.high is None:
        return "-"
    return f"{number_text(comparison.low, sign=True)} to {number_text(comparison.high, sign=True)}"


def number_text(value: float, *, sign: bool = False) -> str:
    """Write a number of a table."""
    plus = "+" if sign else ""
    return f"{value:{plus},.1f}" if abs(value) > 1 else f"{value:{plus}.4f}"


def failure_lines(failures: Sequence[Failure]) -> list[str]:
    """Write one line for each arm that could not be played."""
    return [f"{failure.cell}, arm {failure.arm} left out: {failure.reason}" for failure in failures]


def overstated_lines(runs: Sequence[Run]) -> list[str]:
    """Write one line for each arm whose server said that it reused more than it was asked."""
    most: dict[tuple[str, str], int] = {}
    for run in runs:
        counted = 0 if run.counters is None else run.counters.overstated_hit_tokens
        tokens = max(run.overstated_hit_tokens, counted)
        if tokens:
            most[run.cell, run.arm] = most.get((run.cell, run.arm), 0) + tokens
    return [
        f"{cell}, arm {arm}: the server says that it reused {tokens:,} tokens more than it was"
        " asked: they are not counted"
        for (cell, arm), tokens in most.items()
    ]


def _processor() -> str | None:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return None
