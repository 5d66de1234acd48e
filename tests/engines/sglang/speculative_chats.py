"""Random chats of a server with a drafter: turns, forks, stops, aborts and retractions."""

from __future__ import annotations

import random
from collections.abc import Iterator

from cache_layer import Traffic
from speculative_loop import SpeculativeLoop

CHUNKS = (256, 512, 8_192)
LONGEST = 3_000


class Chats:
    """Traffic of one scheduler; `steps` yields after each turn of it.

    Seven of ten requests go on with one of the latest twelve chats, some from the middle of it.
    """

    def __init__(self, traffic: Traffic, seed: int, **more: bool):
        self.rng = random.Random(seed)
        self.run = SpeculativeLoop(traffic, self.rng, **more)
        self.run.retractions = 0.05
        self.chats: list[tuple[list[int], dict]] = []
        self.asked = self.aborted = 0
        self._free = traffic.requests.mamba_allocator.available_size()

    def steps(self) -> Iterator[None]:
        rng, run = self.rng, self.run
        while True:
            if len(run.queue) < 4 and rng.random() < 0.7:
                self.ask()
            run.chunk = rng.choice(CHUNKS)
            run.step()
            assert run.idle == 0, "requests wait and nothing runs"
            alive = [*run.queue, *run.running, *([run.chunked] if run.chunked else [])]
            if alive and rng.random() < 0.03:
                run.abort(rng.choice(alive))
                self.aborted += 1
            self.listen()
            yield

    def ask(self) -> None:
        rng = self.rng
        tokens: list[int] = []
        space = rng.choice([{}, {}, {}, {"extra_key": "x"}])
        if self.chats and rng.random() < 0.7:
            tokens, space = rng.choice(self.chats[-12:])
            if rng.random() < 0.3:
                tokens = tokens[: rng.randint(len(tokens) // 2, len(tokens))]
        more = rng.choice([30, 200, 700])
        asked = [*tokens, *(rng.randint(10, 999) for _ in range(rng.randint(1, more)))]
        self.run.ask(asked[:LONGEST], rng.randint(1, 60), **space)
        self.asked += 1

    def listen(self) -> None:
        """What was answered can be gone on with."""
        for req in self.run.served:
            tokens = [*req.origin_input_ids, *req.output_ids_through_stop]
            self.chats.append((tokens, {"extra_key": req.extra_key} if req.extra_key else {}))
        self.run.served.clear()
        del self.chats[:-12]

    def drain(self) -> None:
        """Everything ends; then what is cached and what is free is all there is."""
        run = self.run
        run.run(run.steps + 10_000)
        self.listen()
        run.forget()
        run.traffic.check()
        states = run.traffic.requests
        own = 0 if states.mamba_ckpt_pool else run.traffic.core.all_mamba_values_flatten().numel()
        assert own + states.mamba_allocator.available_size() == self._free
        assert run.wrong == 0, f"{run.wrong} wrong states of {run.compared}"
