"""What a replay shows: the table for people and the JSON document for programs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.table import Table

from statecache import __version__
from statecache.errors import escape_control_chars
from statecache.replay.block_pools import PoolRow
from statecache.replay.settings import PoolSettings, ReplaySettings
from statecache.replay.state_slots import ReplayRow

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from statecache.trace.format import Trace

__all__ = ["ReplayReport", "TraceIdentity", "pool_table", "row_table"]


class TraceIdentity(msgspec.Struct, frozen=True):
    """A trace's file name and the SHA-256 of the file as stored."""

    name: str
    sha256: str

    @classmethod
    def of(cls, trace: Trace) -> TraceIdentity:
        """Return that of a trace that was read."""
        return cls(escape_control_chars(Path(trace.name).name), trace.digest)


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON document; `seed` is None unless the trace names one.

    The schema of rows of a pool of blocks is "statecache.pool-replay/1".
    """

    schema: str = "statecache.replay/1"
    version: str = __version__
    trace: TraceIdentity
    seed: int | None
    settings: ReplaySettings | PoolSettings
    rows: Sequence[ReplayRow | PoolRow]

    def to_json(self) -> bytes:
        """Return the document, indented and ending in a newline; the same input, the same bytes."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


_TOTALS = ("requests", "hit\nrate", "ceiling", "missed/\nrequest", "cost/\nrequest", "evicted")


def row_table(rows: Iterable[ReplayRow]) -> Table:
    """Lay out one row a combination; rates are of prompt tokens, `missed` is in tokens."""
    table = _table("policy", "slots", "admission")
    for row in rows:
        table.add_row(row.policy, str(row.slots), row.admission, *_totals(row))
    return table


def pool_table(rows: Sequence[PoolRow]) -> Table:
    """Lay out rows of pools of blocks, all with one kind of policy; `ceiling` is the KV found."""
    apart = bool(rows) and rows[0].checkpoint_slots is not None
    table = _table(
        *(["policy", "pool", "slots"] if apart else ["block\npolicy", "pool"]), "admission"
    )
    for row in rows:
        slots = [str(row.checkpoint_slots)] if apart else []
        policy = row.policy if apart else row.block_policy
        table.add_row(policy, str(row.pool_blocks), *slots, row.admission, *_totals(row))
    return table


def _table(*combination: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in (*combination, *_TOTALS):
        left = heading in ("policy", "block\npolicy", "admission")
        table.add_column(
            heading,
            justify="left" if left else "right",
            vertical="bottom",
            overflow="fold",
        )
    return table


def _totals(row: ReplayRow | PoolRow) -> tuple[str, ...]:
    return (
        str(row.requests),
        _ratio(row.hit_tokens, row.prompt_tokens, 4),
        _ratio(row.resident_tokens, row.prompt_tokens, 4),
        _ratio(row.missed_by_state_tokens, row.requests, 1),
        _ratio(row.recompute_cost, row.requests, 4),
        str(row.evicted_states),
    )


def _ratio(part: float, whole: int, digits: int) -> str:
    return f"{part / whole:.{digits}f}" if whole else "-"
