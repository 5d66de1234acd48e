"""The command `statecache doctor`. It runs where the native index does not load, too."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from statecache.cli.output import check_output, whole_file
from statecache.engine.seams import is_broken
from statecache.engine.spec import engine_named, engines
from statecache.engine.versions import pip_line
from statecache.errors import SettingsError, escape_control_chars
from statecache.tools.doctor import Report, examine
from statecache.tools.engine_source import examine_source
from statecache.tools.http_client import ServerAddress

__all__ = ["doctor_command", "main"]

_MARKS = {"ok": "ok     ", "note": "note   ", "problem": "PROBLEM"}


def doctor_command(
    engine: Annotated[
        str | None,
        typer.Option(help=f"Look at this one alone: {', '.join(engines())} (default: all there)."),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="A running server: is the plugin active in it? (by its /metrics)"),
    ] = None,
    engine_source: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR|WHEEL",
            help="Look at an engine that is not installed, by its source alone: what has moved?",
        ),
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the report as JSON; - for stdout, no lines then."),
    ] = None,
    seams: Annotated[
        bool, typer.Option("--seams", help="Show every seam, not only those that are not in place.")
    ] = False,
) -> None:
    """Would the plugin work here? Exit code 0 if so, else 1 with the reason.

    Nothing is installed or changed, and no engine is loaded into this process.
    """
    if engine is not None:
        engine_named(engine)
    if url is not None:
        ServerAddress(url)  # a bad one is said before the long look
        if engine_source is not None:
            raise SettingsError("--engine-source and --url: give one of them")
    if json:
        check_output("--json", json)
    errors = Console(stderr=True)
    if engine_source is not None:
        report = examine_source(engine_source, engine)
    elif sys.stderr.isatty():
        with errors.status("looking") as status:
            report = examine(engine, url, lambda what: status.update(f"looking at {what}"))
    else:
        report = examine(engine, url)
    if json:
        with whole_file("--json", json) as file:
            file.write(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    if str(json) != "-":
        lines = _lines(report, all_seams=seams)
        verdict = _verdict(report) if engine_source is None else _source_verdict(report)
        typer.echo("\n".join([*lines, verdict]))
    if not report.works:
        raise typer.Exit(1)


def _lines(report: Report, *, all_seams: bool) -> list[str]:
    lines = [f"statecache {report.statecache}, Python {report.python}"]
    lines += [
        f"{_MARKS[finding.level]} {finding.about:11} {escape_control_chars(finding.text)}"
        for finding in report.findings
    ]
    if all_seams:
        for name, found in report.engines.items():
            lines += [f"  {name} {seam}: {state}" for seam, state in found.seams.items()]
    return lines


def _verdict(report: Report) -> str:
    known = engines()
    if report.works:
        new = [
            f"{known[name].title} {found.version}"
            for name, found in report.engines.items()
            if found.version not in found.tested
        ]
        if new:
            return f"It should work; {' and '.join(new)} was not tested."
        return "It would work."
    problems = [finding.about for finding in report.findings if finding.level == "problem"]
    # What is of some engines alone: themselves, and the extensions they need.
    concerned = {
        name: [spec for spec in known.values() if name == spec.name or name in spec.extensions]
        for name in problems
    }
    titles = {spec.name: spec.title for specs in concerned.values() for spec in specs}
    fine = [name for name in report.engines if name not in titles]
    if fine and all(concerned.values()):
        broken = " and ".join(titles.values())
        alone = f"--engine {fine[0]} looks at {known[fine[0]].title} alone"
        return f"It would not work in {broken}: {len(problems)} above ({alone}).{_cure(report)}"
    return f"It would not work: {len(problems)} above.{_cure(report)}"


def _source_verdict(report: Report) -> str:
    if report.works:
        changed = any(state != "ok" for e in report.engines.values() for state in e.seams.values())
        return "Only what is noted above is off." if changed else "No difference was found."
    count = sum(finding.level == "problem" for finding in report.findings)
    return f"It would not work: {count} above.{_cure(report)}"


def _cure(report: Report) -> str:
    """Say how to get a tested version of each engine that has parts that moved."""
    lines = [
        pip_line(name, found.tested)
        for name, found in report.engines.items()
        if any(map(is_broken, found.seams.values())) and found.version not in found.tested
    ]
    return f" A tested version: {', '.join(lines)}" if lines else ""


def main() -> int:
    """Run this command alone, from the words behind `doctor`."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(doctor_command)
    try:
        code = app(sys.argv[2:], standalone_mode=False, prog_name="statecache doctor")
    except SettingsError as error:
        sys.stderr.write(f"statecache: {error}\n")
        return 2
    return code if isinstance(code, int) else 0
