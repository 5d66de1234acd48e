"""The command `statecache replay`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from statecache import CostModel
from statecache.cli.output import check_outputs, shown_progress, table_console, whole_file
from statecache.cli.plot import check_plot, draw_hit_rates
from statecache.cli.replay_options import Options, pool_settings, replay_settings
from statecache.engine.cost import cost_text, default_cost
from statecache.errors import SettingsError, escape_control_chars
from statecache.index.admissions import POOL, SLOTS, admission_names, admission_summaries
from statecache.index.policies import (
    BASELINE,
    DEFAULT,
    DEFAULT_WITHOUT_PROMPTS,
    REPLAY,
    pool_policy_names,
    summaries,
)
from statecache.replay.block_policies import block_policy_summaries
from statecache.replay.block_pools import pool_rows
from statecache.replay.kv_residency import kv_timeline
from statecache.replay.prefix_tree import PrefixTree
from statecache.replay.report import ReplayReport, TraceIdentity, pool_table, row_table
from statecache.replay.schedule import make_schedule
from statecache.replay.settings import PoolSettings, ReplaySettings
from statecache.replay.state_slots import ReplayRow, replay
from statecache.trace.format import Trace, read_trace

__all__ = ["replay_command"]

_POOL = "A pool of blocks"


def replay_command(
    trace: Annotated[
        str, typer.Argument(metavar="TRACE", help="Trace file, plain or gzip, or - for stdin.")
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Which state goes first. {summaries(REPLAY)}. Commas or repeat"
            f" (default: {BASELINE},{DEFAULT_WITHOUT_PROMPTS},{DEFAULT}; with --pool-blocks"
            f" {BASELINE},{DEFAULT_WITHOUT_PROMPTS})."
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
            help=f"Where states are set, with intervals of --chunk tokens."
            f" {admission_summaries(SLOTS)}. Commas or repeat (default: dense). With --pool-blocks"
            f" {', '.join(admission_names(POOL))}; branch points are where the resident KV of a"
            " prompt ended (default: branch-points, with --checkpoint-slots dense)."
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
    block_policy: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=_POOL,
            help="Without --checkpoint-slots, which free block goes first."
            f" {block_policy_summaries()}. Commas or repeat (default: all).",
        ),
    ] = None,
    order: Annotated[list[str] | None, typer.Option(hidden=True)] = None,
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
            help="Keep states in N slots of their own, ruled by --policy"
            f" {' or '.join(pool_policy_names())}, and KV alone in the blocks they leave of"
            " --pool-blocks.",
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
        block_policy=block_policy,
        order=order,
        state_blocks=state_blocks,
        checkpoint_slots=checkpoint_slots,
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
    rows = list(shown_progress("replay", _slot_rows(recorded, settings), settings.combinations))
    name = escape_control_chars(Path(recorded.name).name)
    picture = draw_hit_rates(rows, f"Replay of {name}", plot.suffix[1:].lower()) if plot else b""
    if json:
        report = ReplayReport(
            trace=TraceIdentity.of(recorded), seed=recorded.seed, settings=settings, rows=rows
        )
        _write(json, report)
    if plot:
        with whole_file("--plot", plot) as file:
            file.write(picture)
    if str(json) != "-":
        table_console().print(row_table(rows))


def _replay_pools(trace: str, settings: PoolSettings, json: Path | None) -> None:
    _check_outputs(trace, json, None)
    recorded = read_trace(trace, limit=settings.limit)
    played = pool_rows(PrefixTree.of(recorded), settings)
    rows = list(shown_progress("replay", played, settings.combinations))
    if json:
        report = ReplayReport(
            schema="statecache.pool-replay/1",
            trace=TraceIdentity.of(recorded),
            seed=recorded.seed,
            settings=settings,
            rows=rows,
        )
        _write(json, report)
    if str(json) != "-":
        table_console().print(pool_table(rows))


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
        schedule = make_schedule(tree, kv, admission, settings.chunk_tokens)
        for slots in settings.slots:
            for policy in settings.policies:
                yield replay(schedule, policy, slots, cost)
