"""The public conversations of kv-cache-tester: one JSON file each.

A file has `block_size`, `tool_tokens` and `system_tokens` (what all prompts of the conversation
begin with) and `requests`, each with `t` (seconds since the conversation began), `in` and `out`
(tokens), `hash_ids` (one for each whole block of the prompt), and mostly `api_time` (seconds until
the answer was there) and `think_time` (seconds between the answer before it and the request). An
entry of the type `subagent` has requests of its own, which the conversation waited for. Ids of the
scope `local` mean something within one file, those of the scope `global` in all files.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, TypeVar

import msgspec

from statecache.errors import TraceError
from statecache.trace.format import BLOCK_TOKENS, MAX_MILLISECONDS, BlockId, Length
from statecache.trace.time_order import TraceLine

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

__all__ = ["Conversation", "ConversationConverter"]

_MOST_PAUSE_S = 60  # what kv-cache-tester, too, waits at most before a request
_START_EVERY_MS, _START_WITHIN_MS = 37_000, 1_800_000  # the files do not say when one began

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class Entry(msgspec.Struct, frozen=True, rename={"input_length": "in", "output_length": "out"}):
    """A request of a conversation, or a sub-agent with requests of its own."""

    t: Seconds
    type: str = ""
    input_length: Length | None = None
    output_length: Length | None = None
    hash_ids: list[BlockId] | None = None
    api_time: Seconds | None = None
    think_time: Seconds | None = None
    requests: list[Entry] | None = None
    tool_tokens: Length = 0
    system_tokens: Length = 0


class Conversation(msgspec.Struct, frozen=True):
    """A file of kv-cache-tester; fields it does not name are ignored."""

    requests: list[Entry]
    block_size: Annotated[int, msgspec.Meta(ge=1, le=BLOCK_TOKENS)]
    hash_id_scope: Literal["local", "global"] = "local"
    tool_tokens: Length = 0
    system_tokens: Length = 0


class _Agent(NamedTuple):
    """Whose requests are converted: the conversation's own, or those of a sub-agent."""

    file: str
    field: str
    session: str
    ids_per_block: int
    prompt: tuple[int, int]  # tokens of its tools and of its system prompt


class ConversationConverter:
    """Turns one conversation after the other into requests of a trace.

    Conversations begin 37 s apart, all within half an hour, and keep their pace, but that nobody
    thinks for more than 60 s. Prompts of two conversations share what the tools and the system
    prompt fill, if these have the same numbers of tokens in both. With `published` they share it
    even where the file says that it changed under way, and a request's thinking time passes after
    it: so the trace behind the published tables was made.
    """

    def __init__(self, *, published: bool = False) -> None:
        self._published = published
        self._conversations = 0
        self._ids = _PromptIds(shared_by_position=published)

    def requests(self, file: str, conversation: Conversation) -> Iterator[TraceLine]:
        """Yield the requests of the next conversation, those of sub-agents among them.

        Raises `TraceError` naming `file` and the field.
        """
        ids_per_block, rest = divmod(BLOCK_TOKENS, conversation.block_size)
        if rest:
            problem = f"field block_size: {conversation.block_size} does not divide {BLOCK_TOKENS}"
            raise TraceError(file, problem)
        number = self._conversations
        self._conversations += 1
        self._ids.begin_conversation(conversation.hash_id_scope)
        prompt = (conversation.tool_tokens, conversation.system_tokens)
        agent = _Agent(file, "requests", f"conv-{number:04}", ids_per_block, prompt)
        start_ms = number * _START_EVERY_MS % _START_WITHIN_MS
        try:
            yield from self._requests(agent, conversation.requests, start_ms)
        except RecursionError as error:
            raise TraceError(file, "is nested too deeply") from error

    def _requests(
        self, agent: _Agent, entries: list[Entry], start_ms: int
    ) -> Generator[TraceLine, None, int]:
        """Yield an agent's requests, and return when its last one ended, in milliseconds."""
        now = ended = subagents_ended = start_ms
        before: Entry | None = None
        subagents = 0
        for place, entry in enumerate(entries):
            field = f"{agent.field}[{place}]"
            if entry.type == "subagent":
                subagents += 1
                subagent = agent._replace(
                    field=f"{field}.requests",
                    session=f"{agent.session}-agent-{subagents}",
                    prompt=(entry.tool_tokens, entry.system_tokens),
                )
                own = _given(agent.file, f"{field}.requests", entry.requests)
                subagents_ended = max(
                    subagents_ended, (yield from self._requests(subagent, own, ended))
                )
                continue
            if before is not None:
                now += round(1000 * self._gap_s(before, entry))
            now = max(now, subagents_ended)
            yield self._line(agent, field, entry, now, is_first=before is None)
            ended = now + round(1000 * (entry.api_time or 0))
            before = entry
        return max(ended, subagents_ended)

    def _gap_s(self, before: Entry, entry: Entry) -> float:
        """Return the seconds between two requests of an agent."""
        served = before.api_time or 0
        if self._published:
            return min(before.think_time or 0, _MOST_PAUSE_S) + served
        gap = max(0, entry.t - before.t)
        pause = gap - served if entry.think_time is None else min(entry.think_time, gap)
        return gap - max(0, pause - _MOST_PAUSE_S)

    def _line(
        self, agent: _Agent, field: str, entry: Entry, now_ms: int, *, is_first: bool
    ) -> TraceLine:
        tokens = _given(agent.file, f"{field}.in", entry.input_length)
        output = _given(agent.file, f"{field}.out", entry.output_length)
        ids = _given(agent.file, f"{field}.hash_ids", entry.hash_ids)
        blocks = tokens // BLOCK_TOKENS
        if len(ids) < blocks * agent.ids_per_block:
            needed = f"in {tokens} needs {blocks * agent.ids_per_block}"
            raise TraceError(
                agent.file, f"field {field}.hash_ids: has {len(ids)} ids, but {needed}"
            )
        if now_ms > MAX_MILLISECONDS:
            raise TraceError(agent.file, f"field {field}.t: is too long after the first request")
        parts = (
            tuple(ids[first : first + agent.ids_per_block])
            for first in range(0, blocks * agent.ids_per_block, agent.ids_per_block)
        )
        found = [self._ids.of(part, b, agent.prompt, is_first) for b, part in enumerate(parts)]
        return TraceLine(now_ms, tokens, output, found, agent.session)


class _PromptIds:
    """Numbers blocks of 512 tokens, each a tuple of the file's ids, in the order they appear."""

    def __init__(self, *, shared_by_position: bool) -> None:
        self._shared_by_position = shared_by_position
        self._shared: dict[tuple[tuple[int, int], int], int] = {}
        self._own: dict[tuple[int, ...], int] = {}  # of this conversation
        self._scope = "local"
        self._next = 0

    def begin_conversation(self, scope: str) -> None:
        self._own = {}
        self._scope = scope

    def of(self, part: tuple[int, ...], block: int, prompt: tuple[int, int], is_first: bool) -> int:
        if self._scope == "global":
            told = b"".join(number.to_bytes(8, signed=True) for number in part)
            return int.from_bytes(blake2b(told, digest_size=8).digest()) >> 1
        is_shared = block < sum(prompt) // BLOCK_TOKENS
        if is_shared and self._shared_by_position:
            return self._numbered(self._shared, (prompt, block))
        if part not in self._own and is_shared and is_first:
            self._own[part] = self._numbered(self._shared, (prompt, block))
        return self._numbered(self._own, part)

    def _numbered(self, numbers: dict[_Key, int], key: _Key) -> int:
        number = numbers.setdefault(key, self._next)
        self._next += number == self._next
        return number


def _given(file: str, field: str, value: _Value | None) -> _Value:
    if value is None:
        raise TraceError(file, f"field {field}: is missing")
    return value
