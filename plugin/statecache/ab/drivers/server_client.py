"""Asks a server over HTTP and takes the time."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from statecache.ab.server_results import Answered
from statecache.errors import escape_control_chars
from statecache.tools.http_client import (
    ServerError,
    http_faults,
    open_async,
    reason_of,
    said_by,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import httpx

    from statecache.ab.server_arm import ServerArm

__all__ = ["Client", "Question", "RequestError"]

_SHOWN_CHARACTERS = 300
_FAULTS: tuple[type[Exception], ...] = (*http_faults(), msgspec.DecodeError, RecursionError)
# Of a line: a server that tells the ids of an answer tells those of its prompt too.
_MOST_LINE_BYTES = 2**22


class RequestError(Exception):
    """A request failed; the message is one line."""


class Question(msgspec.Struct, frozen=True):
    """A prompt, how many tokens its answer has, and whether it is to come as token ids too."""

    prompt: list[int]
    output_tokens: int
    wants_ids: bool = False


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None


class _Piece(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class Client:
    """One server; `connected` makes one. `arm` knows its key, which no message may show."""

    def __init__(self, http: httpx.AsyncClient, arm: ServerArm, model: str, seconds: float) -> None:
        self._http = http
        self._arm = arm
        self._model = model
        self._seconds = seconds
        self._start = time.perf_counter()

    @classmethod
    @asynccontextmanager
    async def connected(
        cls, url: str, arm: ServerArm, model: str, seconds: float
    ) -> AsyncIterator[Client]:
        """Ask `model` at `url`; a request that takes longer than `seconds` fails.

        Raises `RequestError` if there can be no such URL.
        """
        key = arm.key()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            client = open_async(url.rstrip("/").removesuffix("/v1"), headers)
        except ServerError as error:
            raise RequestError(str(error)) from error
        async with client as http:
            yield cls(http, arm, model, seconds)

    async def get(self, path: str) -> bytes:
        """Return what is at `path`. Raises `RequestError`."""
        async with self._failing_in_a_line():
            reply = await self._http.get(path)
            if reply.status_code != 200:
                raise RequestError(self._refusal(reply))
            return reply.content

    async def ask(self, question: Question) -> Answered:
        """Return the answer, or the error that came in its place."""
        body = msgspec.json.encode(self._body(question))
        asked_at = time.perf_counter()
        answer = _Answer(asked_at)
        problem: str | None = None
        try:
            async with (
                self._failing_in_a_line(),
                self._http.stream(
                    "POST",
                    "v1/completions",
                    content=body,
                    headers={"Content-Type": "application/json"},
                ) as reply,
            ):
                if reply.status_code != 200:
                    await reply.aread()
                    raise RequestError(self._refusal(reply))
                async for line in _lines(reply):
                    answer.take(line)
            problem = answer.problem and self._shown(answer.problem)
        except RequestError as error:
            problem = str(error)
        return Answered(
            prompt_tokens=len(question.prompt),
            cached_tokens=answer.cached_tokens,
            output_tokens=answer.output_tokens,
            asked_at=asked_at - self._start,
            ended_at=time.perf_counter() - self._start,
            pieces=answer.pieces(),
            error=problem,
            output_ids=answer.ids,
        )

    def _body(self, question: Question) -> dict[str, object]:
        body: dict[str, object] = {
            "model": self._model,
            "prompt": question.prompt,
            "max_tokens": question.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        return body | {"return_token_ids": True} if question.wants_ids else body

    @asynccontextmanager
    async def _failing_in_a_line(self) -> AsyncIterator[None]:
        """Raise `RequestError` for whatever goes wrong, and where it takes too long."""
        try:
            async with asyncio.timeout(self._seconds):
                yield
        except TimeoutError as error:
            raise RequestError(f"no answer within {self._seconds:g} s") from error
        except _FAULTS as error:
            raise RequestError(
                self._shown(f"{type(error).__name__}: {reason_of(error)}")
            ) from error

    def _refusal(self, reply: httpx.Response) -> str:
        said = said_by(reply.content, reply.headers.get("Content-Type", ""))
        return self._shown(f"status {reply.status_code}: {said}")

    def _shown(self, text: str) -> str:
        """Return an error's text as it may be shown: the key is hidden before it is cut."""
        return escape_control_chars(self._arm.hidden(text)[:_SHOWN_CHARACTERS])


class LineTooLongError(ValueError):
    """No server sends such a line; the message says how long it was."""


async def _lines(reply: httpx.Response) -> AsyncIterator[bytes]:
    """Yield the lines of a stream as they come. Raises `LineTooLongError`."""
    rest = bytearray()
    async for piece in reply.aiter_bytes():
        *lines, last = piece.split(b"\n")
        for line in lines:
            yield bytes(rest) + line
            rest.clear()
        rest += last
        if len(rest) > _MOST_LINE_BYTES:
            raise LineTooLongError(f"a line has more than {_MOST_LINE_BYTES} bytes")
    if rest:
        yield bytes(rest)


class _Answer:
    """What of a stream has come so far."""

    def __init__(self, asked_at: float) -> None:
        self._asked_at = asked_at
        self._pieces: list[tuple[float, int | None]] = []  # when, and how many tokens until then
        self._usage: _Usage | None = None
        self._ended = False
        self._error: str | None = None
        self.cached_tokens: int | None = None
        self.ids: list[int] | None = None

    def take(self, line: bytes) -> None:
        """Take in a line. Raises `msgspec.DecodeError` if it is not one of such a stream."""
        if not line.startswith(b"data:"):
            return
        content = line[5:].strip()
        if content == b"[DONE]":
            self._ended = True
            return
        piece = msgspec.json.decode(content, type=_Piece)
        if piece.error is not None:
            self._error = f"error in the stream: {piece.error}"
        if piece.choices:
            so_far = piece.usage.completion_tokens if piece.usage else None
            self._pieces.append((time.perf_counter() - self._asked_at, so_far))
            if piece.choices[0].token_ids is not None:
                self.ids = [*(self.ids or []), *piece.choices[0].token_ids]
        if piece.usage:
            self._usage = piece.usage
            if piece.usage.prompt_tokens_details:
                self.cached_tokens = piece.usage.prompt_tokens_details.cached_tokens

    @property
    def problem(self) -> str | None:
        """What is wrong with the stream, now that it has ended."""
        if self._error is None and not self._ended:
            return "the stream broke off"
        return self._error or (None if self.pieces() else "an answer without a token")

    @property
    def output_tokens(self) -> int:
        """How many tokens the answer has; without a word of the server a piece counts for one."""
        return self._usage.completion_tokens if self._usage else len(self._pieces)

    def pieces(self) -> list[tuple[float, int]]:
        """Return when tokens came, and how many: a server behind with sending puts some together.

        Where pieces do not say how many, each has one. The last piece may only say that it ends.
        """
        found, before = [], 0
        for at, so_far in self._pieces:
            total = min(before + 1, self.output_tokens) if so_far is None else so_far
            if total > before:
                found.append((at, total - before))
                before = total
        return found
