"""A small server of OpenAI's completions, in the place of an engine: in a thread or as a program.

It streams one piece a token, and remembers prompts in blocks of `BLOCK` tokens. What it does wrong
is its mode: `hangs`, `breaks` (closes the connection after a piece), `fails` (status 500), `moody`
(that in each third request), `refuses` (an error in the stream), `long` and `deep` (a line that
nobody can read), `silent` (no usage), `secret` (usage at the end alone, without cached tokens),
`lumps` (two tokens at a time), `dies` (the whole process, in its twelfth request), `mute` (never
token ids), `strict` (refuses a request for them), `fails later` (status 500 from its fourth on).

It answers none before `together` requests were there at once. With a `clock` its pauses pass there
and cost no time. With `metrics` it has counters as the plugin ("statecache"), vLLM or SGLang names
them; with the variable STAND_IN_KEY in its environment it asks for that key, and shows it in its
log.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

if TYPE_CHECKING:
    from support.waiting import Clock

BLOCK = 4
VOCABULARY = 1000
MODEL = "stand-in"
METRICS = {
    "statecache": [
        f"statecache_{name}_total"
        for name in ("requests", "prompt_tokens", "hit_tokens", "missed_by_state_tokens", "skips")
    ],
    "vllm": [
        f"vllm:{name}_total"
        for name in ("request_success", "prompt_tokens", "prompt_tokens_cached")
    ],
    "sglang": [
        f"sglang:{name}_total" for name in ("num_requests", "prompt_tokens", "cached_tokens")
    ],
}
_ODD_LINES = {"long": b"x" * 5_000_000, "deep": b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"}


class StandIn:
    def __init__(
        self,
        mode: str = "",
        first_ms: float = 0,
        between_ms: float = 0,
        metrics: str = "",
        *,
        together: int = 0,
        clock: Clock | None = None,
    ) -> None:
        self.mode, self.first_ms, self.between_ms = mode, first_ms, between_ms
        self.metrics = metrics
        self.together, self.clock = together, clock
        self.counted = dict.fromkeys(("requests", "prompt_tokens", "hit_tokens"), 0)
        self.key = os.environ.get("STAND_IN_KEY")
        self.prompts: list[list[int]] = []
        self.outputs: list[int] = []
        self.asked: Path | None = None
        self.at_once = self.most_at_once = 0
        self.url = ""
        self._known: set[tuple[int, ...]] = set()
        self._shown: dict[str, int] | None = None
        self._asked = 0

    def application(self) -> web.Application:
        application = web.Application(client_max_size=2**24, middlewares=[self._guarded])
        application.router.add_get("/metrics", self._metrics)
        application.router.add_get("/health", self._health)
        application.router.add_get("/version", self._version)
        application.router.add_get("/v1/models", self._models)
        application.router.add_post("/v1/completions", self._completions)
        return application

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Any) -> web.StreamResponse:
        given = request.headers.get("Authorization")
        if self.key is None or (given == f"Bearer {self.key}" and self.mode != "closed"):
            return await handler(request)
        sys.stderr.write(f"not let in with {given}\n")
        return web.json_response({"error": f"not let in with {given}"}, status=401)

    async def _metrics(self, _request: web.Request) -> web.Response:
        names = METRICS.get(self.metrics)
        if names is None:
            return web.Response(status=404)
        counted = self._counted_so_far()
        if counted is None:
            return web.Response(text="sglang:max_running_requests 8\n")
        values = [counted["requests"], counted["prompt_tokens"]]
        values += [counted["hit_tokens"], 2 * values[0], 3 * values[0]]
        return web.Response(
            text="".join(
                f'# TYPE {name} counter\n{name}{{engine="x",reason="a"}} {value}.0\n'
                for name, value in zip(names, values, strict=False)
            )
        )

    def _counted_so_far(self) -> dict[str, int] | None:
        """What is shown; "behind" shows a change when it has been asked for four times."""
        if self.mode != "behind":
            return self.counted
        if self._shown != self.counted:
            self._asked += 1
            if self._asked == 4:
                self._shown, self._asked = dict(self.counted), 0
        return self._shown

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(text="OK")

    async def _version(self, _request: web.Request) -> web.Response:
        return web.json_response({"version": "9.9"})

    async def _models(self, _request: web.Request) -> web.Response:
        card = {"id": MODEL, "object": "model", "owned_by": "tests", "max_model_len": 2000}
        return web.json_response({"object": "list", "data": [card]})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        if self.asked is not None:
            with self.asked.open("a") as file:
                file.write(".")
        asked = msgspec.json.decode(await request.read())
        assert asked["model"] == MODEL
        assert (asked["stream"], asked["ignore_eos"], asked["temperature"]) == (True, True, 0)
        self.prompts.append(asked["prompt"])
        self.outputs.append(asked["max_tokens"])
        wants_ids = "return_token_ids" in asked
        if wants_ids and self.mode == "strict":
            return web.json_response({"error": "return_token_ids?"}, status=400)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return await self._answer(
                request, asked["prompt"], asked["max_tokens"], wants_ids and self.mode != "mute"
            )
        finally:
            self.at_once -= 1

    async def _answer(
        self, request: web.Request, prompt: list[int], tokens: int, wants_ids: bool
    ) -> web.StreamResponse:
        mode = self.mode if len(self.prompts) > 2 else ""  # the first two show that all is well
        if mode == "hangs":
            await asyncio.sleep(1000)
        if (
            mode == "fails"
            or (mode == "moody" and len(self.prompts) % 3 == 2)
            or (mode == "fails later" and len(self.prompts) > 3)
        ):
            return web.json_response({"error": "out of luck"}, status=500)
        cached = self._cached(prompt)
        answer = answer_to(prompt, tokens) if wants_ids else []
        self._known_from(prompt + answer)
        self.counted["requests"] += 1
        self.counted["prompt_tokens"] += len(prompt)
        self.counted["hit_tokens"] += cached
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        for number in range(tokens):
            await self._pause(self.between_ms if number else self.first_ms)
            if mode == "lumps" and number % 2:  # sent with the one after
                continue
            await _send(reply, self._piece(mode, number + 1, answer[number : number + 1]))
            if mode == "breaks":
                request.transport.close()
                return reply
            if mode in _ODD_LINES:
                await reply.write(b"data: " + _ODD_LINES[mode] + b"\n\n")
            if mode == "refuses":
                await _send(reply, {"error": {"message": "no room"}})
                break
            if mode == "dies" and len(self.prompts) == 12:
                sys.stderr.write("the last\nwords\n\n")
                sys.stderr.flush()
                os._exit(7)
        await _send(reply, self._piece(mode, tokens))  # SGLang says so why it ended
        usage = {"prompt_tokens": len(prompt), "completion_tokens": tokens}
        if mode != "secret":
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        if mode != "silent":
            await _send(reply, {"choices": [], "usage": usage})
        await reply.write(b"data: [DONE]\n\n")
        return reply

    async def _pause(self, milliseconds: float) -> None:
        while len(self.prompts) > 2 and self.most_at_once < self.together:
            await asyncio.sleep(0.01)
        if self.clock is None:
            await asyncio.sleep(milliseconds / 1000)
        else:
            self.clock.now += milliseconds / 1000

    def _piece(self, mode: str, so_far: int, ids: list[int] | None = None) -> dict:
        choice: dict = {"index": 0, "text": "x" if so_far == 1 else ""}
        piece: dict = {"choices": [choice | ({"token_ids": ids} if ids else {})]}
        if mode not in ("silent", "secret"):
            piece["usage"] = {"prompt_tokens": 1, "completion_tokens": so_far}
        return piece

    def _cached(self, prompt: list[int]) -> int:
        """Whole blocks known from the start; the last token is always computed."""
        ends = range(BLOCK, len(prompt) + 1, BLOCK)
        known = [end for end in ends if end < len(prompt) and tuple(prompt[:end]) in self._known]
        return max(known, default=0)

    def _known_from(self, tokens: list[int]) -> None:
        self._known.update(tuple(tokens[:end]) for end in range(BLOCK, len(tokens) + 1, BLOCK))


def answer_to(prompt: list[int], tokens: int) -> list[int]:
    """What it answers: numbers that depend on all of the prompt."""
    return [(sum(prompt) + 7 * number) % VOCABULARY for number in range(tokens)]


async def _send(reply: web.StreamResponse, document: dict) -> None:
    await reply.write(b"data: " + msgspec.json.encode(document) + b"\n\n")


@contextmanager
def standing_in(mode: str = "", **more: Any) -> Iterator[StandIn]:
    """A server in a thread of its own."""
    server = StandIn(mode, **more)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> web.AppRunner:
        runner = web.AppRunner(server.application(), shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    runner = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--mode", default="")
    parser.add_argument("--first-ms", type=float, default=0)
    parser.add_argument("--metrics", default="")
    parser.add_argument("--pids", help="a file that gets the process id")
    parser.add_argument("--asked", help="a file that gets a byte for each request")
    given = parser.parse_args()
    if given.pids:
        with Path(given.pids).open("a") as file:
            file.write(f"{os.getpid()}\n")
    server = StandIn(given.mode, given.first_ms, metrics=given.metrics)
    server.asked = None if given.asked is None else Path(given.asked)
    application = server.application()
    web.run_app(application, host="127.0.0.1", port=given.port, print=None, shutdown_timeout=0.1)


if __name__ == "__main__":
    main()
