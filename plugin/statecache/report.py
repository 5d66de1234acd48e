"""What a replay shows: the table for people and the JSON document for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from rich.table import Table

from statecache import __version__
from statecache.replay import ReplayRow

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["CostSettings", "ReplayReport", "ReplaySettings", "TraceIdentity", "row_table"]


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


class TraceIdentity(msgspec.Struct, frozen=True):
    """A trace's file name and the SHA-256 of the file as stored."""

    name: str
    sha256: str


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON document; `seed` is None unless the trace names one."""

    schema: str = "statecache.replay/1"
    version: str = __version__
    trace: TraceIdentity
    seed: int | None
    settings: ReplaySettings
    rows: list[ReplayRow]

    def to_json(self) -> bytes:
        """Return the document, indented and ending in a newline; the same input, the same bytes."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


_HEADINGS = (
    "policy",
    "slots",
    "admission",
    "requests",
    "hit\nrate",
    "ceiling",
    "missed/\nrequest",
    "cost/\nrequest",
    "evicted",
)


def row_table(rows: Iterable[ReplayRow]) -> Table:
    """Lay out one row a combination; rates are of prompt tokens, `missed` is in tokens."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in _HEADINGS:
        left = heading in ("policy", "admission")
        table.add_column(
            heading,
            justify="left" if left else "right",
            vertical="bottom",
            overflow="fold",
        )
    for row in rows:
        table.add_row(
            row.policy,
            str(row.slots),
            row.admission,
            str(row.requests),
            _ratio(row.hit_tokens, row.prompt_tokens, 4),
            _ratio(row.resident_tokens, row.prompt_tokens, 4),
            _ratio(row.missed_by_state_tokens, row.requests, 1),
            _ratio(row.recompute_cost, row.requests, 4),
            str(row.evicted_states),
        )
    return table


def _ratio(part: float, whole: int, digits: int) -> str:
    return f"{part / whole:.{digits}f}" if whole else "-"
