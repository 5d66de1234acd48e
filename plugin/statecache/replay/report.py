"""What a replay shows: the table for people and the JSON document for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from rich.table import Table

from statecache import __version__
from statecache.replay.block_pools import PoolRow
from statecache.replay.state_slots import ReplayRow

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "CostSettings",
    "PoolSettings",
    "ReplayReport",
    "ReplaySettings",
    "TraceIdentity",
    "pool_table",
    "row_table",
]


class CostSettings(msgspec.Struct, frozen=True):
    """The coefficients of the cost model."""

    linear: float
    quadratic: float


class ReplaySettings(msgspec.Struct, frozen=True):
    """What was asked for; None is unlimited KV, or no limit on requests."""

    policies: list[str]
    slots: list[int]
    admissions: list[str]
    kv_tokens: int | None
    chunk_tokens: int
    limit: int | None
    cost: CostSettings

    @property
    def combinations(self) -> int:
        """The number of rows."""
        return len(self.policies) * len(self.slots) * len(self.admissions)


class PoolSettings(msgspec.Struct, frozen=True):
    """What was asked of a pool of blocks; what does not apply is None.

    With `checkpoint_slots` states are ruled by `policies`, else all blocks by `orders`.
    """

    pool_blocks: list[int]
    state_blocks: float
    orders: list[str] | None
    checkpoint_slots: list[int] | None
    policies: list[str] | None
    admissions: list[str]
    interior_weight: float | None
    queue_ratio: float | None
    chunk_tokens: int
    limit: int | None
    cost: CostSettings

    @property
    def combinations(self) -> int:
        """The number of rows."""
        each = len(self.orders or ()) or len(self.checkpoint_slots or ()) * len(self.policies or ())
        return len(self.pool_blocks) * len(self.admissions) * each


class TraceIdentity(msgspec.Struct, frozen=True):
    """A trace's file name and the SHA-256 of the file as stored."""

    name: str
    sha256: str


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
    """Lay out rows of pools of blocks, all with one rule's name; `ceiling` counts the KV found."""
    rule = "policy" if rows and rows[0].order is None else "order"
    table = _table(rule, "pool", "slots", "admission")
    for row in rows:
        slots = "-" if row.checkpoint_slots is None else str(row.checkpoint_slots)
        table.add_row(
            row.order or row.policy, str(row.pool_blocks), slots, row.admission, *_totals(row)
        )
    return table


def _table(*combination: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in (*combination, *_TOTALS):
        left = heading in ("policy", "order", "admission")
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
