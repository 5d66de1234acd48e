"""A small server of OpenAI's completions, in the place of an engine: in a thread or as a program.

It streams one piece a token, and remembers prompts in blocks of `BLOCK` tokens. What it does wrong
is its mode: `hangs`, `breaks` (closes the connection after a piece), `fails` (status 500), `moody`
(that in each third request), `refuses` (an error in the stream), `long` and `deep` (a line that
nobody can read), `silent` (no usage), `secret` (usage at the end alone, without cached tokens),
`lumps` (two tokens at a time), `dies` (the whole process, in its twelfth request).
"""

import argparse
import asyncio
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from aiohttp import web

BLOCK = 4
VOCABULARY = 1000
MODEL = "stand-in"
_ODD_LINES = {"long": b"x" * 5_000_000, "deep": b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"}


class StandIn:
    def __init__(self, mode: str = "", first_ms: float = 0, between_ms: float = 0) -> None:
        self.mode, self.first_ms, self.between_ms = mode, first_ms, between_ms
        self.prompts: list[list[int]] = []
        self.outputs: list[int] = []
        self.arrived: list[float] = []
        self.at_once = self.most_at_once = 0
        self.url = ""
        self._known: set[tuple[int, ...]] = set()

    def application(self) -> web.Application:
        application = web.Application(client_max_size=2**24)
        application.router.add_get("/health", self._health)
        application.router.add_get("/version", self._version)
        application.router.add_get("/v1/models", self._models)
        application.router.add_post("/v1/completions", self._completions)
        return application

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(text="OK")

    async def _version(self, _request: web.Request) -> web.Response:
        return web.json_response({"version": "9.9"})

    async def _models(self, _request: web.Request) -> web.Response:
        card = {"id": MODEL, "object": "model", "owned_by": "tests", "max_model_len": 2000}
        return web.json_response({"object": "list", "data": [card]})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        self.arrived.append(time.monotonic())
        asked = msgspec.json.decode(await request.read())
        assert asked["model"] == MODEL
        assert (asked["stream"], asked["ignore_eos"], asked["temperature"]) == (True, True, 0)
        self.prompts.append(asked["prompt"])
        self.outputs.append(asked["max_tokens"])
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return await self._answer(request, asked["prompt"], asked["max_tokens"])
        finally:
            self.at_once -= 1

    async def _answer(
        self, request: web.Request, prompt: list[int], tokens: int
    ) -> web.StreamResponse:
        mode = self.mode if len(self.prompts) > 2 else ""  # the first two show that all is well
        if mode == "hangs":
            await asyncio.sleep(1000)
        if mode == "fails" or (mode == "moody" and len(self.prompts) % 3 == 2):
            return web.json_response({"error": "out of luck"}, status=500)
        cached = self._cached(prompt)
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        for number in range(tokens):
            await asyncio.sleep((self.between_ms if number else self.first_ms) / 1000)
            if mode == "lumps" and number % 2:  # sent with the one after
                continue
            await _send(reply, self._piece(mode, number + 1))
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

    def _piece(self, mode: str, so_far: int) -> dict:
        piece: dict = {"choices": [{"index": 0, "text": "x" if so_far == 1 else ""}]}
        if mode not in ("silent", "secret"):
            piece["usage"] = {"prompt_tokens": 1, "completion_tokens": so_far}
        return piece

    def _cached(self, prompt: list[int]) -> int:
        """Whole blocks known from the start; the last token is always computed."""
        ends = range(BLOCK, len(prompt) + 1, BLOCK)
        known = [end for end in ends if end < len(prompt) and tuple(prompt[:end]) in self._known]
        self._known.update(tuple(prompt[:end]) for end in ends)
        return max(known, default=0)


async def _send(reply: web.StreamResponse, document: dict) -> None:
    await reply.write(b"data: " + msgspec.json.encode(document) + b"\n\n")


@contextmanager
def standing_in(mode: str = "", first_ms: float = 0, between_ms: float = 0) -> Iterator[StandIn]:
    """A server in a thread of its own."""
    server = StandIn(mode, first_ms, between_ms)
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
    parser.add_argument("--pids", help="a file that gets the process id")
    given = parser.parse_args()
    if given.pids:
        with Path(given.pids).open("a") as file:
            file.write(f"{os.getpid()}\n")
    server = StandIn(given.mode, given.first_ms)
    application = server.application()
    web.run_app(application, host="127.0.0.1", port=given.port, print=None, shutdown_timeout=0.1)


if __name__ == "__main__":
    main()
