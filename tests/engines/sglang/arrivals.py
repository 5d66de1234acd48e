"""Random requests that arrive, in bursts that begin alike, and are aborted at any moment."""

from __future__ import annotations

import random
from collections.abc import Iterator

from cache_layer import Traffic
from schedule_loop import Loop


def small_heads(run: Loop, tokens: int) -> None:
    """Have heads of so many tokens be worth a wait, so that prompts can be short."""
    heads = run.traffic.core.scheduler_side._waits._heads
    heads._least = tokens


class Arrivals:
    """Traffic of one scheduler; `steps` yields after each turn of it."""

    def __init__(self, core: str, seed: int, overlap: bool = False, **sizes: int):
        self.run = Loop(Traffic(core, rows=24, longest=200, **sizes), 100, overlap)
        small_heads(self.run, 8)
        self.rng = random.Random(seed)
        self.fresh = iter(range(1_000, 1 << 40))
        self.heads = [self.tokens(self.rng.randint(5, 80)) for _ in range(6)]
        self.arrived = self.aborted = 0
        self.alive: list = []

    def tokens(self, number: int) -> list[int]:
        return [next(self.fresh) for _ in range(number)]

    def steps(self) -> Iterator[None]:
        while True:
            if self.rng.random() < 0.4 and len(self.run.queue) < 30:
                self.burst()
            if self.alive and self.rng.random() < 0.5:
                self.abort(self.rng.choice(self.alive))
            self.run.step()
            assert self.run.idle == 0, "requests wait and nothing runs"
            self.alive = [req for req in self.alive if not req.finished()]
            yield

    def burst(self) -> None:
        rng = self.rng
        head = rng.choice(self.heads)
        if rng.random() < 0.3:
            head = head[: rng.randint(1, len(head))] + self.tokens(rng.randint(1, 60))
            head = self.heads[rng.randrange(6)] = head[:140]
        space = rng.choice([{}, {}, {"extra_key": "x"}, {"lora_id": "y"}])
        for _ in range(rng.choice([1, 1, 2, 6, 16])):
            cut = rng.choice([len(head), len(head), rng.randint(1, len(head))])
            prompt = head[:cut] + self.tokens(rng.randint(0, 20))
            self.alive.append(self.run.add(prompt, **space))
            self.arrived += 1

    def abort(self, req) -> None:
        self.run.abort(req)
        self.aborted += 1

    def drain(self) -> None:
        """Everything there is ends; then what is cached and what is free is all there is."""
        self.run.run(self.run.steps + 10_000)
        self.run.traffic.check()
        self.run.forget()
