"""The `statecache` command."""

from __future__ import annotations

import gzip
import os
import signal
import sys
from pathlib import Path
from types import FrameType
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
_ClickException: Any = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)


def main() -> int:
    """Run the command; bad input is one line on stderr and exit code 2, an interrupt 130.

    SIGTERM and SIGHUP end it as cleanly, with 128 and their number.
    """
    _open_closed_streams()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup, for one, has it ignored
            signal.signal(number, _leave)
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


def _open_closed_streams() -> None:
    """Give standard streams that are closed the null device, so that no file gets their number."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115


def _leave(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one must not stop the cleaning up
    sys.exit(128 + number)


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
        typer.Option(help="lru, gds, clairvoyant: commas or repeat (default: lru,gds)."),
    ] = None,
    slots: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N,N",
            help="Numbers of state slots: commas or repeat (default: 64,128,256,1024).",
        ),
    ] = None,
    kv_tokens: Annotated[
        str, typer.Option(metavar="N|unlimited", help="KV pool in tokens.")
    ] = "unlimited",
    admission: Annotated[
        list[str] | None,
        typer.Option(
            help="Where states are set: dense (every --chunk tokens and at the prompt's end) or"
            " ends: commas or repeat (default: dense)."
        ),
    ] = None,
    chunk: Annotated[int, typer.Option(help="Tokens between dense states.")] = 8192,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Read the first N requests only.", metavar="N")
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write rows and settings as JSON; - for stdout, in place of the table.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw hit rate over slots: .png, .svg or .pdf."),
    ] = None,
    cost: Annotated[
        str, typer.Option(metavar="LINEAR,QUADRATIC", help="Coefficients of the cost model.")
    ] = "1.862e-5,3.33e-6",
) -> None:
    """Replay a recorded workload: how many tokens do the states kept save?"""
    settings = ReplaySettings(
        policies=_known("--policy", policy or ["lru,gds"], POLICIES),
        slots=_slots(slots or ["64,128,256,1024"]),
        admissions=_known("--admission", admission or ["dense"], ADMISSIONS),
        kv_tokens=_kv_tokens(kv_tokens),
        chunk_tokens=_chunk(chunk),
        limit=limit,
        cost=_cost(cost),
    )
    _check_outputs(trace, json, plot)
    recorded = read_trace(trace, limit=limit)
    rows = _replay_all(recorded, settings)
    name = on_one_line(Path(recorded.name).name)
    picture = draw_hit_rates(rows, f"Replay of {name}", plot.suffix[1:].lower()) if plot else b""
    if json:
        identity = TraceIdentity(name, recorded.digest)
        report = ReplayReport(trace=identity, seed=recorded.seed, settings=settings, rows=rows)
        with whole_file("--json", json) as file:
            file.write(report.to_json())
    if plot:
        with whole_file("--plot", plot) as file:
            file.write(picture)
    if str(json) != "-":
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
    check_output("--output", output)
    with whole_file("--output", output) as file:
        if output.suffix.lower() == ".gz":
            with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed:
                packed.writelines(lines)
        else:
            file.writelines(lines)


def _check_outputs(trace: str, json: Path | None, plot: Path | None) -> None:
    if plot:
        check_plot(plot)
    for flag, path in (("--json", json), ("--plot", plot)):
        if path:
            check_output(flag, path, trace)
    if json and plot and os.path.realpath(json) == os.path.realpath(plot):
        raise SettingsError("--plot: names the same file as --json: name another")


def _replay_all(recorded: Trace, settings: ReplaySettings) -> list[ReplayRow]:
    cost = CostModel(settings.cost.linear, settings.cost.quadratic)
    combinations = len(settings.policies) * len(settings.slots) * len(settings.admissions)
    errors = Console(stderr=True)
    hidden = not sys.stderr.isatty()  # the console believes FORCE_COLOR instead
    rows: list[ReplayRow] = []
    with Progress(console=errors, transient=True, disable=hidden) as progress:
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
    """Return the console of stdout: each row is one line, uncut, however narrow the terminal."""
    return Console(width=1_000, color_system="auto" if sys.stdout.isatty() else None)


def _parts(values: list[str]) -> list[str]:
    """Split each value at its commas and drop what comes again."""
    return list(dict.fromkeys(part.strip() for value in values for part in value.split(",")))


def _known(flag: str, values: list[str], known: tuple[str, ...]) -> list[str]:
    names = _parts(values)
    for name in names:
        if name not in known:
            raise SettingsError(f"{flag}: unknown {flag[2:]} {name!r}: use {', '.join(known)}")
    return names


def _slots(values: list[str]) -> list[int]:
    slots = [_integer("--slots", part, least=1) for part in _parts(values)]
    return list(dict.fromkeys(slots))  # 8 and 08 are one


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
