"""The command `statecache fit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from statecache.cli.output import check_outputs, shown_progress, table_console, whole_file
from statecache.cli.plot import check_plot, draw_fit
from statecache.errors import SettingsError, escape_control_chars
from statecache.tools.fit import (
    Fit,
    Measurement,
    check_installed,
    check_lengths,
    fit_cost,
    read_measurements,
)
from statecache.tools.fit_server import PrefillServer, default_lengths
from statecache.tools.http_client import ServerAddress

__all__ = ["fit_command"]


class _Report(msgspec.Struct, frozen=True, kw_only=True):
    schema: str = "statecache.fit/1"
    source: str
    model: str | None
    statecache_cost: str
    fit: Fit


def fit_command(
    measurements: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE.csv]", help="Lines of tokens,seconds: measured prefills."),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="Measure on this server, in place of a file. Nobody else may use it."),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="N,N",
            help="Lengths to measure (default: 9/10 of the longest prompt, 131072 at most, its"
            " half, and so on: at most 8, none below 64).",
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, max=1000, help="Times each is measured.")] = 3,
    request_seconds: Annotated[
        int, typer.Option(min=1, max=86_400, help="Longest time of a request to --url.")
    ] = 600,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write what was measured as CSV.")
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the fit as JSON; - for stdout, no table then."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw it: .png, .svg or .pdf.")
    ] = None,
) -> None:
    """Fit --statecache-cost to measured prefill times, and say how well it fits.

    Needs numpy and scipy, which the extra ab of statecache brings.
    """
    if (measurements is None) == (url is None):
        raise SettingsError("fit: give a file of measurements or --url, one of them")
    if url is None and (lengths or save):
        raise SettingsError(f"{'--lengths' if lengths else '--save'}: needs --url")
    asked = None if lengths is None else _lengths(lengths)
    address = None if url is None else ServerAddress(url)
    if plot:
        check_plot(plot)
    source = None if measurements is None else str(measurements)
    check_outputs({"--save": save, "--json": json, "--plot": plot}, source)
    model, found = None, list[Measurement]()
    if address is not None:
        server = PrefillServer(address, request_seconds)
        check_installed()
        model, found = server.model, _measured(server, asked, repeats)
    elif measurements is not None:
        found = read_measurements(measurements)
        check_installed()
    if save:
        _save(save, found)
    fit = fit_cost(found, escape_control_chars(source or "--url"))
    name = escape_control_chars(model or Path(source or "").name)
    _write(fit, name, model, json, plot)


def _write(fit: Fit, name: str, model: str | None, json: Path | None, plot: Path | None) -> None:
    if json:
        report = _Report(source=name, model=model, statecache_cost=fit.flag, fit=fit)
        with whole_file("--json", json) as file:
            file.write(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    if plot:
        with whole_file("--plot", plot) as file:
            file.write(draw_fit(fit, f"Prefill: {name}", plot.suffix[1:].lower()))
    if str(json) != "-":
        table_console().print(_table(fit))
        overhead = f"{fit.overhead_seconds:.3g} s a request besides"
        typer.echo(f"error {fit.error:.1%} (root mean square, relative); {overhead}")
        typer.echo(f"--statecache-cost {fit.flag}")


def _measured(server: PrefillServer, lengths: list[int] | None, repeats: int) -> list[Measurement]:
    most = server.most_tokens
    asked = default_lengths(most) if lengths is None else lengths
    check_lengths(asked, "--lengths")
    if max(asked) >= most:
        raise SettingsError(f"--lengths: {max(asked)} does not fit the {most} tokens a prompt has")
    measured = server.measure(asked, repeats)
    return list(shown_progress("prefill", measured, repeats * sum(asked), lambda m: m.tokens))


def _lengths(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 0 < len(part) < 10 for part in parts):
        raise SettingsError(f"--lengths: {text!r} is no list of numbers of tokens")
    if min(map(int, parts)) < 1:
        raise SettingsError("--lengths: a prompt has 1 token or more")
    found = sorted(set(map(int, parts)))
    check_lengths(found, "--lengths")
    return found


def _save(path: Path, found: list[Measurement]) -> None:
    rows = "".join(f"{point.tokens},{point.seconds!r}\n" for point in found)
    with whole_file("--save", path) as file:
        file.write(f"tokens,seconds\n{rows}".encode())


def _table(fit: Fit) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("tokens", "measured, s", "tokens/s", "fitted, s", "error"):
        table.add_column(column, justify="right")
    for point in fit.points:
        error = f"{point.error:+.1%}"
        measured = f"{point.seconds:.4f}", f"{point.tokens / point.seconds:,.1f}"
        table.add_row(f"{point.tokens:,}", *measured, f"{point.fitted:.4f}", error)
    return table
