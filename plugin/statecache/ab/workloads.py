"""Workloads of a test: what is asked, in which order, by seed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from statecache.errors import SettingsError
from statecache.generate import AgentWorkload, agent_lines
from statecache.generate_prefixes import DistinctPrefixes, SharedPrefix, prefix_lines
from statecache.trace import Request, Trace, read_trace

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["KINDS", "Workload", "closed_loop"]

_PREFIXES = ("count", "rounds", "prefix_tokens", "own_tokens")
_SIZES = {
    "agent": ("sessions", "turns", "loop"),
    "distinct-prefixes": _PREFIXES,
    "shared-prefix": _PREFIXES,
    "trace": ("file", "limit"),
}
KINDS = tuple(_SIZES)


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kind of workload and its sizes; which apply depends on the kind.

    `loop` is closed for agents that each ask again as soon as they are answered, open for the order
    of time. A trace is read from `file`; it has no seed, so it can be played but once.
    """

    kind: Literal["agent", "distinct-prefixes", "shared-prefix", "trace"] = "agent"
    sessions: int = 32
    turns: int = 40
    loop: Literal["open", "closed"] = "open"
    count: int = 256
    rounds: int = 4
    prefix_tokens: int = 1024
    own_tokens: int = 512
    file: str | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        applies = ("kind", *_SIZES[self.kind])
        defaults = dict(zip(self.__struct_fields__, self.__struct_defaults__, strict=True))
        for field, default in defaults.items():
            if field not in applies and getattr(self, field) != default:
                raise SettingsError(f"{field} is no setting of {self.kind}")

    @property
    def seeded(self) -> bool:
        """Whether another seed gives another workload."""
        return self.kind in ("agent", "shared-prefix")

    def trace(self, seed: int) -> Trace:
        """Return the requests. Raises `SettingsError`."""
        if self.kind == "trace":
            if self.file is None:
                raise SettingsError("workload: kind trace needs a file")
            return read_trace(self.file, limit=self.limit)
        lines: Iterable[bytes]
        if self.kind == "agent":
            lines = agent_lines(AgentWorkload(self.sessions, self.turns, seed))
        else:
            lines = prefix_lines(self._prefixes(seed))
        asked = [msgspec.json.decode(line, type=_Asked) for line in lines]
        if self.kind == "agent" and self.loop == "closed":
            asked = closed_loop(asked)
        return Trace(self.kind, "", seed, [one.request() for one in asked])

    def _prefixes(self, seed: int) -> DistinctPrefixes | SharedPrefix:
        kind: Any = DistinctPrefixes if self.kind == "distinct-prefixes" else SharedPrefix
        made: DistinctPrefixes | SharedPrefix = kind(
            count=self.count,
            rounds=self.rounds,
            prefix_tokens=self.prefix_tokens,
            own_tokens=self.own_tokens,
            seed=seed,
        )
        return made


class _Asked(msgspec.Struct, frozen=True):
    input_length: int
    output_length: int
    hash_ids: list[int]
    session_id: int = 0

    def request(self) -> Request:
        return Request(0, self.input_length, self.output_length, self.hash_ids)


def closed_loop(asked: list[_Asked]) -> list[_Asked]:
    """Order the requests of sessions that all run at once: each session's next one in turn."""
    by_session: dict[int, list[_Asked]] = {}
    for one in asked:
        by_session.setdefault(one.session_id, []).append(one)
    ordered = []
    for turn in range(max(map(len, by_session.values()))):
        ordered += [turns[turn] for turns in by_session.values() if turn < len(turns)]
    return ordered
