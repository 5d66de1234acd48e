"""The `statecache` command."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import Progress

from statecache import CostModel, __version__
from statecache.cli.ab import ab_command
from statecache.cli.doctor import doctor_command
from statecache.cli.fit import fit_command
from statecache.cli.generate import generate
from statecache.cli.output import check_outputs, whole_file
from statecache.cli.plan import plan_command
from statecache.cli.plot import check_plot, draw_hit_rates
from statecache.cli.replay_options import Options, pool_settings, replay_settings
from statecache.cli.trace import trace
from statecache.engine.cost import cost_text, default_cost
from statecache.errors import SettingsError, escape_control_chars
from statecache.index.policies import BASELINE, DEFAULT, REPLAY, summaries
from statecache.replay.block_pools import pool_rows
from statecache.replay.kv_residency import kv_timeline
from statecache.replay.prefix_tree import PrefixTree
from statecache.replay.report import (
    PoolSettings,
    ReplayReport,
    ReplaySettings,
    TraceIdentity,
    pool_table,
    row_table,
)
from statecache.replay.schedule import make_schedule
from statecache.replay.state_slots import ReplayRow, replay
from statecache.trace.format import Trace, read_trace

__all__ = ["app", "main"]

app = typer.Typer(
    name="statecache",
    help="Prefix caching for hybrid LLMs: which recurrent state to drop, and how many fit.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(generate, name="generate")
app.add_typer(trace, name="trace")
app.command("ab")(ab_command)
app.command("plan")(plan_command)
app.command("doctor")(doctor_command)
app.command("fit")(fit_command)

_Row = TypeVar("_Row")

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
    sys.stderr.write(f"statecache: {escape_control_chars(' '.join(message.split()))}\n")
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


_POOL = "A pool of blocks"


@app.command("replay")
def replay_command(
    trace: Annotated[
        str, typer.Argument(metavar="TRACE", help="Trace file, plain or gzip, or - for stdin.")
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Which state goes first. {summaries(REPLAY)}. Commas or repeat"
            f" (default: {BASELINE},{DEFAULT})."
        ),
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
            help="Where states are set: dense (every --chunk tokens and at the prompt's end),"
            " ends or aligned (at the last multiple of --chunk): commas or repeat (default: dense)."
            " With --pool-blocks not aligned, but also junctions (where the resident KV ends, and"
            " at the prompt's end; the default of one pool) and dense+junctions."
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
    ] = cost_text(default_cost()),
    pool_blocks: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N,N",
            rich_help_panel=_POOL,
            help="Replay on pools of N blocks of 512 tokens that KV and states share,"
            " in place of --slots and --kv-tokens.",
        ),
    ] = None,
    order: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=_POOL,
            help="Without --checkpoint-slots, which free block goes first: stock (in the order"
            " they were freed), copies (second copies, then as stock) or reuse (copies, then what"
            " was never reused): commas or repeat (default: all).",
        ),
    ] = None,
    state_blocks: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            rich_help_panel=_POOL,
            help="Blocks that a state takes (default: 3); a fraction with --checkpoint-slots only.",
        ),
    ] = None,
    checkpoint_slots: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N,N",
            rich_help_panel=_POOL,
            help="Keep states in N slots of their own, ruled by --policy lru or gds, and KV alone"
            " in the blocks they leave of --pool-blocks.",
        ),
    ] = None,
    interior_weight: Annotated[
        float | None,
        typer.Option(
            metavar="W",
            rich_help_panel=_POOL,
            help="To compare with: gds counts the gain of a state in a slot W times while another"
            " one is below it (default: 1, as in the engines).",
        ),
    ] = None,
    queue_ratio: Annotated[
        float | None,
        typer.Option(
            metavar="R",
            rich_help_panel=_POOL,
            help="To compare with: what was never reused goes at an R-th of the age (default:"
            " learnt by the order reuse; 1 with --checkpoint-slots).",
        ),
    ] = None,
) -> None:
    """Replay a recorded workload: how many tokens do the states kept save?

    A line of TRACE is a request, a JSON object with these fields:

    timestamp: milliseconds, 0 or more
    input_length, output_length: tokens of the prompt and of the answer
    hash_ids: one whole number of 64 bits for each 512 tokens of the prompt

    Requests are served in the order of the file. Two prompts are the same as
    far as their ids agree from the start. What is behind the last whole block
    of a prompt does not count. Other fields are ignored here; session_id tells
    the command ab which requests belong together.
    """
    options = Options(
        policy=policy,
        slots=slots,
        kv_tokens=kv_tokens,
        pool_blocks=pool_blocks,
        order=order,
        state_blocks=state_blocks,
        checkpoint_slots=checkpoint_slots,
        interior_weight=interior_weight,
        queue_ratio=queue_ratio,
        admission=admission,
        chunk=chunk,
        limit=limit,
        cost=cost,
    )
    if pool_blocks is None:
        _replay_slots(trace, replay_settings(options), json, plot)
    elif plot:
        raise SettingsError("--plot: draws hit rate over --slots: leave out --pool-blocks")
    else:
        _replay_pools(trace, pool_settings(options), json)


def _replay_slots(
    trace: str, settings: ReplaySettings, json: Path | None, plot: Path | None
) -> None:
    _check_outputs(trace, json, plot)
    recorded = read_trace(trace, limit=settings.limit)
    rows = _played(_slot_rows(recorded, settings), settings.combinations)
    name = escape_control_chars(Path(recorded.name).name)
    picture = draw_hit_rates(rows, f"Replay of {name}", plot.suffix[1:].lower()) if plot else b""
    if json:
        _write(
            json,
            ReplayReport(
                trace=_identity(recorded), seed=recorded.seed, settings=settings, rows=rows
            ),
        )
    if plot:
        with whole_file("--plot", plot) as file:
            file.write(picture)
    if str(json) != "-":
        _console().print(row_table(rows))


def _replay_pools(trace: str, settings: PoolSettings, json: Path | None) -> None:
    _check_outputs(trace, json, None)
    recorded = read_trace(trace, limit=settings.limit)
    rows = _played(pool_rows(PrefixTree.of(recorded), settings), settings.combinations)
    if json:
        _write(
            json,
            ReplayReport(
                schema="statecache.pool-replay/1",
                trace=_identity(recorded),
                seed=recorded.seed,
                settings=settings,
                rows=rows,
            ),
        )
    if str(json) != "-":
        _console().print(pool_table(rows))


def _identity(recorded: Trace) -> TraceIdentity:
    return TraceIdentity(escape_control_chars(Path(recorded.name).name), recorded.digest)


def _write(json: Path, report: ReplayReport) -> None:
    with whole_file("--json", json) as file:
        file.write(report.to_json())


def _check_outputs(trace: str, json: Path | None, plot: Path | None) -> None:
    if plot:
        check_plot(plot)
    check_outputs({"--json": json, "--plot": plot}, trace)


def _slot_rows(recorded: Trace, settings: ReplaySettings) -> Iterator[ReplayRow]:
    cost = CostModel(settings.cost.linear, settings.cost.quadratic)
    tree = PrefixTree.of(recorded)
    kv = kv_timeline(tree, settings.kv_tokens)
    for admission in settings.admissions:
        plan = make_schedule(tree, kv, admission, settings.chunk_tokens)
        for slots in settings.slots:
            for policy in settings.policies:
                yield replay(plan, policy, slots, cost)


def _played(rows: Iterable[_Row], combinations: int) -> list[_Row]:
    """Return the rows, and show how far they are."""
    errors = Console(stderr=True)
    hidden = not sys.stderr.isatty()  # the console believes FORCE_COLOR instead
    played: list[_Row] = []
    with Progress(console=errors, transient=True, disable=hidden) as progress:
        task = progress.add_task("replay", total=combinations)
        for row in rows:
            played.append(row)
            progress.advance(task)
    return played


def _console() -> Console:
    """Return the console of stdout: each row is one line, uncut, however narrow the terminal."""
    return Console(width=1_000, color_system="auto" if sys.stdout.isatty() else None)
