"""The command `statecache plan`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table

from statecache import __version__
from statecache.cli.output import (
    check_output,
    shown_progress,
    split_at_commas,
    table_console,
    whole_file,
)
from statecache.engine.sizes import bytes_in
from statecache.engine.spec import engine_named, engines
from statecache.errors import SettingsError, escape_control_chars
from statecache.replay.prefix_tree import PrefixTree
from statecache.replay.report import TraceIdentity
from statecache.sizing.model_config import (
    DRAFT_KEYS,
    DTYPE_BYTES,
    HybridModel,
    read_model,
    sizing_of,
)
from statecache.sizing.splits import Demand, Split, best_splits, rated_splits
from statecache.trace.format import BLOCK_TOKENS, read_trace

__all__ = ["plan_command"]

_STATE_DTYPES = ("float32", "bfloat16", "float16")


def _slots_in_each() -> str:
    return ", ".join(f"{spec.slots_per_request} in {spec.title}" for spec in engines().values())


class _Sizes(msgspec.Struct, frozen=True):
    """Bytes on one rank, in one engine."""

    engine: str
    state_bytes: int
    int8_state_bytes: int
    kv_token_bytes: int
    block_tokens: int | None


class _Report(msgspec.Struct, frozen=True, kw_only=True):
    schema: str = "statecache.plan/2"
    version: str = __version__
    trace: TraceIdentity
    demand: Demand
    sizes: list[_Sizes]
    best: dict[str, Split]
    splits: list[Split]


def plan_command(
    model: Annotated[
        Path, typer.Option(metavar="FILE", help="The model's config.json, or its folder.")
    ],
    memory: Annotated[
        str,
        typer.Option(
            metavar="60GiB", help="Memory of one GPU for KV and states, beside the weights."
        ),
    ],
    trace: Annotated[
        str, typer.Option(metavar="TRACE", help="Trace file, plain or gzip, or - for stdin.")
    ],
    engine: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(engines())}: commas or repeat (default: all)."),
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    running: Annotated[int, typer.Option(min=1, help="Requests that run at once.")] = 16,
    slots_per_request: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"State slots of a running request (default: {_slots_in_each()}).",
        ),
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help=f"{', '.join(DTYPE_BYTES)} (default: the model's).")
    ] = None,
    state_dtype: Annotated[
        str | None, typer.Option(help=f"{', '.join(_STATE_DTYPES)} (default: the engine's).")
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of the engine's page or block; an engine may enlarge it."),
    ] = None,
    split: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PERCENT",
            help="Shares for kept states of what running ones leave: commas or repeat"
            " (default: 5,10,20,30,40,60).",
        ),
    ] = None,
    chunk: Annotated[int, typer.Option(help="Tokens between states inside a prompt.")] = 8192,
    draft_tokens: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Tokens a drafter of the model proposes in a step."),
    ] = 0,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Read the first N requests only.")
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write all of it as JSON; - for stdout, no table."),
    ] = None,
) -> None:
    """Recommend how to split memory between KV, running states and kept ones, on a trace.

    The best split rejects the fewest requests, those longer than its KV. Of
    such splits it reuses the most tokens, of these it has the most KV. Where
    every split rejects every request there is none.
    """
    if json:
        check_output("--json", json, trace)
    if chunk < BLOCK_TOKENS or chunk % BLOCK_TOKENS:
        raise SettingsError(f"--chunk: {chunk} is no multiple of {BLOCK_TOKENS}: give e.g. 8192")
    shapes = read_model(model, tp)
    if draft_tokens and not shapes.draft_layers:
        raise SettingsError(
            f"--draft-tokens: {escape_control_chars(str(model))}: this model has no drafter of its"
            f" own ({' or '.join(DRAFT_KEYS)}): leave the flag out"
        )
    demand = Demand(
        model=shapes,
        memory_bytes=_memory(memory),
        engines=[engine_named(name).name for name in split_at_commas(engine or [*engines()])],
        shares=_percents(split or ["5,10,20,30,40,60"]),
        running=running,
        slots_a_request=slots_per_request,
        ranks=tp,
        kv_dtype=_one_of("--kv-dtype", kv_dtype, tuple(DTYPE_BYTES)),
        state_dtype=_one_of("--state-dtype", state_dtype, _STATE_DTYPES),
        block_tokens=block_size,
        chunk_tokens=chunk,
        draft_tokens=draft_tokens,
    )
    _show_and_write(_recommended(demand, trace, limit), json)


def _recommended(demand: Demand, trace: str, limit: int | None) -> _Report:
    """Play every split on the trace. Raises `SettingsError` where none serves a request."""
    recorded = read_trace(trace, limit=limit)
    tree = PrefixTree.of(recorded)
    splits = list(shown_progress("plan", rated_splits(demand, tree), demand.combinations))
    if not splits:
        raise SettingsError("--split: no share leaves room for both a state and KV: give others")
    best = best_splits(splits)
    if not best:
        lengths = [BLOCK_TOKENS * len(path) for path in tree.paths]
        raise SettingsError(
            f"--memory: no split serves any of the {len(lengths):,} requests of a block or more:"
            f" their prompts of {min(lengths):,} to {max(lengths):,} tokens are longer than its KV:"
            " give more"
        )
    return _Report(
        trace=TraceIdentity.of(recorded),
        demand=demand,
        sizes=[_sizes(demand, engine) for engine in demand.engines],
        best=best,
        splits=splits,
    )


def _show_and_write(report: _Report, json: Path | None) -> None:
    if json:
        with whole_file("--json", json) as file:
            file.write(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    if str(json) != "-":
        _show(report)
    for engine_name in report.demand.engines:
        _warn(engine_name, report.best.get(engine_name))


def _warn(engine: str, best: Split | None) -> None:
    """Say on stderr what the recommendation does not serve."""
    if best is None:
        problem = "no split serves a single request"
    elif best.rejected:
        problem = (
            f"even the best split rejects {best.rejected:,} of {best.requests:,} requests, which"
            " are longer than its KV"
        )
    else:
        return
    sys.stderr.write(f"statecache: {engine}: {problem}: give more --memory\n")


def _sizes(demand: Demand, engine: str) -> _Sizes:
    model, asked = demand.model, demand.state_dtype
    return _Sizes(
        engine=engine,
        state_bytes=model.state_bytes(engine, asked),
        int8_state_bytes=model.bytes_at_rest("int8", engine, asked),
        kv_token_bytes=model.kv_token_bytes(demand.kv_dtype),
        block_tokens=sizing_of(engine).block_tokens(demand),
    )


def _show(report: _Report) -> None:
    console = table_console()
    console.print(_facts(report.demand.model, report.demand.ranks), highlight=False)
    for sizes in report.sizes:
        console.print(_size_line(sizes), highlight=False)
    console.print(_table(report.splits, report.best.values()))
    for engine, split in report.best.items():
        console.print(f"best for {engine}: {' '.join(split.flags)}", highlight=False)


def _facts(model: HybridModel, ranks: int) -> str:
    heads, d_v, d_k = model.temporal
    return (
        f"{model.family}: {model.state_layers} layers with a state of {heads} x {d_v} x {d_k} and"
        f" {model.conv_values:,} values of a convolution, {model.attention_layers} with attention"
        f"{f', on each of {ranks} ranks' if ranks > 1 else ''}"
    )


def _size_line(sizes: _Sizes) -> str:
    grows = sizing_of(sizes.engine).block_grows
    block = f", a block of {sizes.block_tokens} tokens at least" if grows else ""
    return (
        f"{sizes.engine}: a state takes {sizes.state_bytes:,} bytes, {sizes.int8_state_bytes:,} in"
        f" int8; a KV token {sizes.kv_token_bytes:,}{block}"
    )


def _table(splits: list[Split], best: Iterable[Split]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    marked = [id(split) for split in best]
    for heading in ("", "engine", "states"):
        table.add_column(heading, vertical="bottom")
    for heading in (
        "share",
        "running\nslots",
        "kept\nslots",
        "KV\ntokens",
        "hit\nrate",
        "rejected",
    ):
        table.add_column(heading, justify="right", vertical="bottom")
    for split in splits:
        table.add_row(
            "*" if id(split) in marked else "",
            split.engine,
            split.states,
            "-" if split.kept_slots is None else f"{split.share} %",
            str(split.active_slots),
            "-" if split.kept_slots is None else f"{split.kept_slots:,}",
            f"{split.kv_tokens:,}",
            f"{split.hit_rate:.4f}",
            str(split.rejected),
        )
    return table


def _memory(text: str) -> int:
    size = bytes_in(text)
    if size is None:
        raise SettingsError(f"--memory: {text!r} is no size: give e.g. 60GiB")
    return size


def _known(flag: str, names: list[str], known: tuple[str, ...]) -> list[str]:
    for name in names:
        if name not in known:
            raise SettingsError(f"{flag}: unknown {flag[2:]} {name!r}: use {', '.join(known)}")
    return names


def _one_of(flag: str, name: str | None, known: tuple[str, ...]) -> Any:
    return None if name is None else _known(flag, [name], known)[0]


def _percents(values: list[str]) -> list[int]:
    parts = split_at_commas(values)
    for part in parts:
        if not re.fullmatch("[1-9][0-9]?", part, re.A):
            raise SettingsError(f"--split: {part!r} is no percentage from 1 to 99")
    return [int(part) for part in parts]
