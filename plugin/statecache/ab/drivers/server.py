"""The driver `server`: a live server, asked over HTTP."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from statecache.ab.drivers.base import ArmError
from statecache.ab.drivers.block_tokens import BlockTokens
from statecache.ab.drivers.interrupts import interrupts_put_off
from statecache.ab.drivers.prompts import Prompts
from statecache.ab.drivers.server_client import Client, Question, RequestError
from statecache.ab.drivers.server_load import at_their_times, session_by_session
from statecache.ab.drivers.server_metrics import (
    counted_tokens,
    counters_between,
    is_of_an_engine,
    read_counters,
)
from statecache.ab.drivers.server_model import ServedModel, served_model
from statecache.ab.drivers.server_process import MemoryWatch, ServerProcess
from statecache.ab.server_results import Answered, Answers
from statecache.trace.format import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from statecache.ab.server_arm import ServerArm, ServerSettings
    from statecache.ab.workloads import Asked, Workload

__all__ = ["Server", "question_tokens"]

_ERRORS_IN_A_ROW = 10
_POLL_SECONDS = 0.25
_REPLY_SECONDS = 10  # of what is no work
# Counters may be a moment behind the answers: they are read until they stand still.
_METRICS_SECONDS, _METRICS_READINGS = 0.4, 12
_FIRST_OUTPUT_TOKENS = 8


def question_tokens(request: Asked, settings: ServerSettings) -> tuple[int, int]:
    """Return how many tokens a request has, whole blocks alone, and how many its answer."""
    blocks = request.input_length // BLOCK_TOKENS
    return blocks * settings.tokens_a_block, max(
        1, min(request.output_length, settings.output_tokens)
    )


class Server:
    """The server of an arm: `start` it, `play` on it, `close` it, and again.

    `salt` sets its tokens apart from those of another arm on the same server.
    """

    def __init__(self, arm: ServerArm, settings: ServerSettings, log: Path, salt: str) -> None:
        self._arm = arm
        self._settings = settings
        self._log = log
        self._salt = salt
        self._process: ServerProcess | None = None
        self._url = arm.url or ""
        self._starts = 0
        self.served: ServedModel | None = None

    def start(self, longest: int) -> None:
        """Launch it or find it, until it has answered. Raises `SettingsError`.

        `longest` is how many tokens a request and its answer will have at most.
        """
        self._starts += 1
        try:
            if self._arm.command is not None:
                with interrupts_put_off():  # or it would run, known to no `close`
                    self._process = ServerProcess(self._arm, self._log)
                self._url = self._process.url
            self.served = asyncio.run(self._get_ready(longest))
        except RequestError as error:
            problem = self._with_fate(str(error))
            self.close()
            raise self._arm.error(problem) from error
        except BaseException:
            self.close()
            raise

    def play(
        self, workload: Workload, asked: Sequence[Asked], seed: int, *, answers: bool = False
    ) -> Answers:
        """Ask all of it. Raises `ArmError`, and a launched server has then ended.

        With `answers` they stand in the prompts that follow.
        """
        if self.served is None:
            raise ArmError("the server is not started")
        watch = None if self._process is None else MemoryWatch(self._process.pid)
        try:
            if watch is not None:
                watch.start()
            found = asyncio.run(self._measured(self.served, workload, asked, seed, answers))
        except ArmError as error:
            problem = self._with_fate(str(error))
            self.close()
            raise ArmError(problem) from error
        finally:
            most = None if watch is None else watch.stop()
        return msgspec.structs.replace(found, peak_resident_bytes=most)

    def close(self) -> None:
        """End it if it was launched; once it is ended this does nothing."""
        self.served = None
        if self._process is not None:
            self._process.close()
            self._process = None

    async def _get_ready(self, longest: int) -> ServedModel:
        async with Client.connected(self._url, self._arm, "", _REPLY_SECONDS) as client:
            if self._process is not None:
                await self._wait_until_healthy(client, self._process)
            try:
                served = await served_model(client, self._arm)
            except RequestError as error:
                if self._process is None:
                    url = self._arm.without_keys().url
                    raise RequestError(f"{url} cannot be reached ({error})") from error
                raise
        if served.most_tokens is not None and longest > served.most_tokens:
            raise self._arm.error(
                f"requests take up to {longest} tokens with their answers, the server"
                f" {served.most_tokens}: set tokens_a_block or output_tokens lower"
            )
        return msgspec.structs.replace(served, tells_ids=await self._ask_first(served))

    async def _wait_until_healthy(self, client: Client, process: ServerProcess) -> None:
        end = time.monotonic() + self._arm.start_seconds
        while True:
            try:
                await client.get("health")
            except RequestError as error:
                if str(error).startswith(("status 401", "status 403")):  # it is there
                    raise
                if str(error).startswith("status 404"):  # so is this one: what it knows is asked
                    return
                if not process.alive:
                    raise RequestError("it did not start") from error
                if time.monotonic() > end:
                    raise RequestError(f"not ready in {self._arm.start_seconds:g} s") from error
                await asyncio.sleep(_POLL_SECONDS)
            else:
                return

    async def _ask_first(self, served: ServedModel) -> bool:
        """Show that it takes such requests, and return whether it tells the ids of its answers.

        Also, the first ones of a server are slow. One that does not know the wish may refuse it.
        """
        tokens = self._tokens(served, f"start {self._starts}")
        with_ids = True
        async with self._client(served) as client:
            for block in range(2):
                question = Question(
                    tokens.prompt([block]), _FIRST_OUTPUT_TOKENS, wants_ids=with_ids
                )
                answered = await client.ask(question)
                if with_ids and (answered.error or "").startswith("status 4"):
                    with_ids = False
                    answered = await client.ask(msgspec.structs.replace(question, wants_ids=False))
                if answered.error is not None:
                    raise RequestError(f"the first request failed: {answered.error}")
                with_ids = with_ids and len(answered.output_ids or []) == answered.output_tokens
        return with_ids

    async def _measured(
        self,
        served: ServedModel,
        workload: Workload,
        asked: Sequence[Asked],
        seed: int,
        answers: bool,
    ) -> Answers:
        prompts = Prompts(self._tokens(served, f"seed {seed}"), asked, answers=answers)
        before = await self._counters(0)
        answered = await self._play(served, workload, asked, prompts, answers)
        if not before:
            return Answers(answered, None)
        tokens = sum(request.prompt_tokens for request in answered if request.error is None)
        after = await self._counters(tokens + (counted_tokens(before) or 0))
        return Answers(answered, counters_between(before, after, tokens))

    async def _counters(self, least: float) -> dict[str, float]:
        """Return what `/metrics` counts, once it stands still with `least` prompt tokens or more.

        That may take some seconds on a busy machine. Nothing where it cannot be read.
        """
        found: dict[str, float] = {}
        with suppress(RequestError):
            async with Client.connected(self._url, self._arm, "", _REPLY_SECONDS) as client:
                for _ in range(_METRICS_READINGS):
                    text = (await client.get("metrics")).decode(errors="replace")
                    read = read_counters(text)
                    tokens = counted_tokens(read)
                    still = tokens is not None and read == found and tokens >= least
                    if still or not is_of_an_engine(text):
                        return read
                    found = read
                    await asyncio.sleep(_METRICS_SECONDS)
        return {}

    async def _play(
        self,
        served: ServedModel,
        workload: Workload,
        asked: Sequence[Asked],
        prompts: Prompts,
        answers: bool,
    ) -> list[Answered]:
        found: dict[int, Answered] = {}
        failed = 0

        async def ask(number: int) -> None:
            nonlocal failed
            _, output_tokens = question_tokens(asked[number], self._settings)
            prompt, known = prompts.of(number)
            answered = await client.ask(Question(prompt, output_tokens, answers))
            if answered.error is None:
                prompts.answer(number, answered.output_ids or [])
            answered = msgspec.structs.replace(answered, answered_tokens=known)
            found[number] = answered
            failed = failed + 1 if answered.error else 0
            if answered.error and (failed == _ERRORS_IN_A_ROW or not await self._lives_on()):
                raise ArmError(f"request {number} failed: {answered.error}")

        async with self._client(served) as client:
            if workload.loop == "open":
                await at_their_times(asked, self._settings.speed, ask)
            else:
                await session_by_session(asked, workload.at_once, ask)
        if failed == len(asked):
            raise ArmError(f"every request failed: {found[0].error}")
        return [found[number] for number in range(len(asked))]

    def _client(self, served: ServedModel) -> AbstractAsyncContextManager[Client]:
        return Client.connected(self._url, self._arm, served.name, self._settings.request_seconds)

    def _tokens(self, served: ServedModel, what: str) -> BlockTokens:
        salt = f"{self._settings.salt} {self._salt} {what}"
        return BlockTokens(salt, served.vocabulary, self._settings.tokens_a_block)

    async def _lives_on(self) -> bool:
        """Whether it still runs after an error; ending takes a process a moment."""
        if self._process is None:
            return True
        await asyncio.sleep(_POLL_SECONDS)
        return self._process.alive

    def _with_fate(self, problem: str) -> str:
        return problem if self._process is None else f"{problem}; {self._process.fate()}"
