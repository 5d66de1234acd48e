"""The `statecache` command."""

from __future__ import annotations

import gzip
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from statecache import CostModel, __version__
from statecache.errors import SettingsError, on_one_line
from statecache.generate import AgentWorkload, agent_lines
from statecache.output import check_output, whole_file
from statecache.plan import ADMISSIONS, PrefixTree, kv_timeline, make_plan
from statecache.plot import check_plot, draw_hit_rates
from statecache.replay import POLICIES, ReplayRow, replay
from statecache.report import CostSettings, ReplayReport, ReplaySettings, TraceIdentity, row_table
from statecache.trace import BLOCK_TOKENS, Trace, read_trace

__all__ = ["app", "main"]

app = typer.Typer(
    name="statecache",
    help="Prefix caching for hybrid LLMs: which recurrent state to drop, and how many fit.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
generate = typer.Typer(help="Make a workload in the trace format.")
app.add_typer(generate, name="generate")

# typer brings its own click or uses the installed one, by version: ask it which.
_ClickException: Any = typer.BadParameter.__mro__[2]


def main() -> int:
    """Run the command; bad input is one line on stderr and exit code 2, an interrupt 130."""
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except SettingsError as error:
        return _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except OSError as error:
        _discard_stdout()
        return 1 if isinstance(error, BrokenPipeError) else _fail(f"output: {error.strerror}", 1)
    except _ClickException as error:
        return _fail(f"{error.format_message()} (statecache --help shows the usage)")
    return code if isinstance(code, int) else 0


def _fail(message: str, code: int = 2) -> int:
    sys.stderr.write(f"statecache: {on_one_line(' '.join(message.split()))}\n")
    return code


def _discard_stdout() -> None:
    """Let the interpreter's last flush succeed although nobody reads."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"statecache {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    del version


@app.command("replay")
def replay_command(
    trace: Annotated[
        str, typer.Argument(metavar="TRACE", help="Trace file, plain or gzip, or - for stdin.")
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(help="lru, gds or clairvoyant; repeat for more (default: lru and gds)."),
    ] = None,
    slots: Annotated[str, typer.Option(help="Numbers of state slots.")] = "64,128,256,1024",
    kv_tokens: Annotated[
        str, typer.Option(metavar="N|unlimited", help="KV pool in tokens.")
    ] = "unlimited",
    admission: Annotated[
        list[str] | None,
        typer.Option(
            help="Where states are set: dense (every --chunk tokens and at the prompt's end) or"
            " ends; repeat for both (default: dense)."
        ),
    ] = None,
    chunk: Annotated[int, typer.Option(help="Tokens between dense states.")] = 8192,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Read the first N requests only.", metavar="N")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write rows and settings as JSON.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw hit rate over slots.")
    ] = None,
    cost: Annotated[
        str, typer.Option(metavar="LINEAR,QUADRATIC", help="Coefficients of the cost model.")
    ] = "1.862e-5,3.33e-6",
) -> None:
    """Replay a recorded workload: how many tokens do the states kept save?"""
    settings = ReplaySettings(
        policies=_known("--policy", policy or ["lru", "gds"], POLICIES),
        slots=_slots(slots),
        admissions=_known("--admission", admission or ["dense"], ADMISSIONS),
        kv_tokens=_kv_tokens(kv_tokens),
        chunk_tokens=_chunk(chunk),
        limit=limit,
        cost=_cost(cost),
    )
    if json:
        check_output("--json", json, keep=trace)
    if plot:
        check_plot(plot)
        check_output("--plot", plot, keep=trace)
    recorded = read_trace(trace, limit=limit)
    rows = _replay_all(recorded, settings)
    name = on_one_line(Path(recorded.name).name)
    if json:
        identity = TraceIdentity(name, recorded.digest)
        report = ReplayReport(trace=identity, seed=recorded.seed, settings=settings, rows=rows)
        with whole_file("--json", json) as file:
            file.write(report.to_json())
    if plot:
        picture = draw_hit_rates(rows, f"Replay of {name}", plot.suffix[1:].lower())
        with whole_file("--plot", plot) as file:
            file.write(picture)
    _console().print(row_table(rows))


@generate.callback()
def _generate() -> None:
    """Make a workload in the trace format."""


@generate.command("agent")
def generate_agent(
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", help="File (.gz compresses), - for stdout."),
    ],
    sessions: Annotated[int, typer.Option(help="Agent sessions.")] = 64,
    turns: Annotated[int, typer.Option(help="Turns a session, on average.")] = 40,
    seed: Annotated[int, typer.Option(help="Another seed, another workload.")] = 0,
) -> None:
    """Growing coding-agent sessions, interleaved in time; the same seed gives the same bytes."""
    try:
        lines = agent_lines(AgentWorkload(sessions, turns, seed))
    except SettingsError as error:
        raise SettingsError(f"--{error}") from error
    if str(output) == "-":
        sys.stdout.buffer.writelines(lines)
        sys.stdout.buffer.flush()
        return
    check_output("--output", output)
    with whole_file("--output", output) as file:
        if output.suffix == ".gz":
            with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed:
                packed.writelines(lines)
        else:
            file.writelines(lines)


def _replay_all(recorded: Trace, settings: ReplaySettings) -> list[ReplayRow]:
    cost = CostModel(settings.cost.linear, settings.cost.quadratic)
    combinations = len(settings.policies) * len(settings.slots) * len(settings.admissions)
    errors = Console(stderr=True)
    rows: list[ReplayRow] = []
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task("replay", total=combinations)
        tree = PrefixTree.of(recorded)
        kv = kv_timeline(tree, settings.kv_tokens)
        for admission in settings.admissions:
            plan = make_plan(tree, kv, admission, settings.chunk_tokens)
            for slots in settings.slots:
                for policy in settings.policies:
                    rows.append(replay(plan, policy, slots, cost))
                    progress.advance(task)
    return rows


def _console() -> Console:
    """Return the console of stdout: a pipe or a file gets each row on one line, uncut."""
    return Console() if sys.stdout.isatty() else Console(width=1_000, color_system=None)


def _known(flag: str, names: list[str], known: tuple[str, ...]) -> list[str]:
    for name in names:
        if name not in known:
            raise SettingsError(f"{flag}: unknown {flag[2:]} {name!r}: use {', '.join(known)}")
    return list(dict.fromkeys(names))


def _slots(text: str) -> list[int]:
    slots = [_integer("--slots", part, least=1) for part in text.split(",")]
    return list(dict.fromkeys(slots))


def _kv_tokens(text: str) -> int | None:
    return None if text == "unlimited" else _integer("--kv-tokens", text, least=BLOCK_TOKENS)


def _chunk(tokens: int) -> int:
    if tokens < BLOCK_TOKENS or tokens % BLOCK_TOKENS:
        raise SettingsError(f"--chunk: {tokens} is no multiple of {BLOCK_TOKENS}: give e.g. 8192")
    return tokens


def _integer(flag: str, text: str, least: int) -> int:
    digits = text.strip()
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 18 and int(digits) >= least):
        raise SettingsError(f"{flag}: {text!r} is no whole number from {least} up")
    return int(digits)


def _cost(text: str) -> CostSettings:
    linear, comma, quadratic = text.partition(",")
    try:
        if not comma:
            raise ValueError("give two numbers with a comma between them")
        model = CostModel(float(linear), float(quadratic))
    except ValueError as error:
        raise SettingsError(f"--cost: {text!r}: {error}") from error
    return CostSettings(model.linear, model.quadratic)


if __name__ == "__main__":
    sys.exit(main())
