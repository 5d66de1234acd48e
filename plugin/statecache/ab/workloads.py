"""Workloads of a test: what is asked, in which order, by seed."""

from __future__ import annotations

import gzip
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from statecache.errors import SettingsError, TraceError
from statecache.trace.format import BLOCK_TOKENS, Request, Trace, read_trace
from statecache.trace.generate_agent import AgentWorkload, agent_lines
from statecache.trace.generate_prefixes import DistinctPrefixes, SharedPrefix, prefix_lines
from statecache.trace.sharegpt import sharegpt_lines

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["KINDS", "SIZES", "Asked", "Workload", "closed_loop"]

_PREFIXES = ("count", "rounds", "prefix_tokens", "own_tokens", "loop", "at_once")
SIZES = {
    "agent": ("sessions", "turns", "loop", "at_once"),
    "distinct-prefixes": _PREFIXES,
    "shared-prefix": _PREFIXES,
    "trace": ("file", "limit", "loop", "at_once"),
    "sharegpt": ("file", "sessions", "loop", "at_once"),
}
KINDS = tuple(SIZES)


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kind of workload and its sizes; which apply depends on the kind.

    `loop` is open for the order of time, and closed for sessions that each ask again as soon as
    they are answered, `at_once` of them (0: all). A trace is read from `file`; it has no seed, so
    it can be played but once, and needs a session_id in each line for a closed loop. In the
    workloads of prefixes each request is a session of its own. Of a file of ShareGPT conversations
    each seed draws `sessions`.
    """

    kind: Literal["agent", "distinct-prefixes", "shared-prefix", "trace", "sharegpt"] = "agent"
    sessions: int = 32
    turns: int = 40
    loop: Literal["open", "closed"] = "open"
    at_once: int = 0
    count: int = 256
    rounds: int = 4
    prefix_tokens: int = 1024
    own_tokens: int = 512
    file: str | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        applies = ("kind", *SIZES[self.kind])
        if self.at_once < 0 or (self.at_once and self.loop == "open"):
            raise SettingsError(f"at_once is {self.at_once}: give 1 or more with loop=closed")
        defaults = dict(zip(self.__struct_fields__, self.__struct_defaults__, strict=True))
        for field, default in defaults.items():
            if field not in applies and getattr(self, field) != default:
                raise SettingsError(f"{field} is no setting of {self.kind}")
        if self.file == "-":
            raise SettingsError("file is -: a workload is read more than once: name a file")
        if "file" in applies and not self.file:
            raise SettingsError(f"kind {self.kind} needs a file")
        if self.kind == "agent":  # each checks its sizes
            AgentWorkload(self.sessions, self.turns)
        elif self.kind == "sharegpt":
            if self.sessions < 1:
                raise SettingsError(f"sessions is {self.sessions}: give at least 1")
        elif self.kind != "trace":
            self._prefixes(0)

    @property
    def seeded(self) -> bool:
        """Whether another seed gives another workload."""
        return self.kind in ("agent", "shared-prefix", "sharegpt")

    def trace(self, seed: int) -> Trace:
        """Return the requests. Raises `SettingsError`."""
        if self.kind == "trace" and self.file is not None and self.loop == "open":
            return read_trace(self.file, limit=self.limit)
        return Trace(self.kind, "", seed, [request.without_times() for request in self.asked(seed)])

    def asked(self, seed: int) -> list[Asked]:
        """Return the requests with their times and sessions. Raises `SettingsError`."""
        if self.kind == "trace" and self.file is not None:
            read_trace(self.file, limit=self.limit)  # says what is wrong with it
            asked = _sessions_of(Path(self.file), self.limit, needed=self.loop == "closed")
        else:
            asked = [msgspec.json.decode(line, type=Asked) for line in self._lines(seed)]
            if SIZES[self.kind] is _PREFIXES:
                asked = [
                    msgspec.structs.replace(request, session_id=n)
                    for n, request in enumerate(asked)
                ]
        return closed_loop(asked, self.at_once or len(asked)) if self.loop == "closed" else asked

    def _lines(self, seed: int) -> Iterator[bytes]:
        if self.kind == "agent":
            return agent_lines(AgentWorkload(self.sessions, self.turns, seed))
        if self.kind == "sharegpt":
            return sharegpt_lines(self.file or "", self.sessions, seed)
        return prefix_lines(self._prefixes(seed))

    def _prefixes(self, seed: int) -> DistinctPrefixes | SharedPrefix:
        kind: Any = DistinctPrefixes if self.kind == "distinct-prefixes" else SharedPrefix
        workload: DistinctPrefixes | SharedPrefix = kind(
            count=self.count,
            rounds=self.rounds,
            prefix_tokens=self.prefix_tokens,
            own_tokens=self.own_tokens,
            seed=seed,
        )
        return workload


class Asked(msgspec.Struct, frozen=True):
    """A line of a trace with its session, if it has one; `timestamp` is in milliseconds."""

    input_length: int
    output_length: int
    hash_ids: list[int]
    session_id: int | str | None = None
    timestamp: int | float = 0

    def without_times(self) -> Request:
        """Return it as a request of a trace; the order is all that is left of its time."""
        return Request(0, self.input_length, self.output_length, self.hash_ids)


def closed_loop(asked: list[Asked], at_once: int) -> list[Asked]:
    """Order the requests of sessions that run `at_once`: each one's next request in turn.

    Sessions begin in the order of their first requests; the next one takes the place of one that
    ended.
    """
    by_session: dict[int | str | None, deque[Asked]] = {}
    for request in asked:
        by_session.setdefault(request.session_id, deque()).append(request)
    waiting = deque(by_session.values())
    running = [waiting.popleft() for _ in range(min(at_once, len(waiting)))]
    ordered = []
    while running:
        following = []
        for session in running:
            ordered.append(session.popleft())
            if session:
                following.append(session)
            elif waiting:
                following.append(waiting.popleft())
        running = following
    return ordered


def _sessions_of(path: Path, limit: int | None, *, needed: bool) -> list[Asked]:
    """Read a trace that is known to be sound once more, with its sessions."""
    stored = path.read_bytes()
    lines = gzip.decompress(stored) if stored.startswith(b"\x1f\x8b") else stored
    asked = []
    for number, line in enumerate(lines.splitlines()[:limit], 1):
        try:
            request = msgspec.json.decode(line, type=Asked)
        except msgspec.ValidationError as error:
            raise TraceError(str(path), f"session_id: {error}", number) from error
        if request.session_id is None and needed:
            raise TraceError(str(path), "has no session_id, which a closed loop needs", number)
        if request.input_length >= BLOCK_TOKENS:
            asked.append(request)
    return asked
