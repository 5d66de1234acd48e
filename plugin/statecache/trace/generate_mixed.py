"""Workloads with one trait at a time: who comes next, rewinds, sub-agents, prompts, cycles, phases.

They are what a policy was not designed on. `mixed_lines` makes one workload from its settings;
`drawn_workload` draws the settings from a seed.
"""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from statecache.errors import SettingsError
from statecache.trace.format import BLOCK_TOKENS
from statecache.trace.generate_agent import FreshBlocks

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CHOICES", "MixedWorkload", "drawn_workload", "mixed_lines"]

CHOICES = ("uniform", "zipf", "bursts", "cycle")
_PROMPT_BLOCKS = (2, 8, 24, 64, 120)


class MixedWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """Sessions that grow, and what is particular about them; shares are of requests, 0 to 1.

    `choice` says which session comes next: any (uniform), the first ones far more often (zipf), one
    for several turns (bursts) or each in turn (cycle). With `subagents` a session now and then
    sends out that many, which fork from its context, take a few turns each and return.
    `prompts` is how many shared system prompts there are, from 2 to 120 blocks. With a `phase`
    the second half of the requests comes from other sessions, chosen so.
    """

    requests: int = 3_000
    sessions: int = 100
    choice: str = "uniform"
    rewinds: float = 0.05
    subagents: int = 0
    prompts: int = 1
    restarts: float = 0.01
    turn_blocks: int = 8
    most_blocks: int = 300
    phase: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, most in (
            ("requests", 100_000),
            ("sessions", 100_000),
            ("turn_blocks", 1_000),
            ("most_blocks", 10_000),
            ("prompts", len(_PROMPT_BLOCKS)),
        ):
            if not 1 <= getattr(self, name) <= most:
                option = name.replace("_", "-")
                raise SettingsError(f"{option} is {getattr(self, name)}: give 1 to {most}")
        if not 0 <= self.subagents <= 100:
            raise SettingsError(f"subagents is {self.subagents}: give 0 to 100")
        for name in ("rewinds", "restarts"):
            if not 0 <= getattr(self, name) <= 1:
                raise SettingsError(f"{name} is {getattr(self, name)}: give 0 to 1")
        for name in ("choice", "phase"):
            if getattr(self, name) not in (*CHOICES, *([None] if name == "phase" else [])):
                raise SettingsError(f"{name} is {getattr(self, name)!r}: use {', '.join(CHOICES)}")
        if not 0 <= self.seed < 2**63:
            raise SettingsError(f"seed is {self.seed}: give 0 to {2**63 - 1}")


def drawn_workload(seed: int) -> MixedWorkload:
    """Return the workload that this seed draws."""
    rng = random.Random(f"drawn {seed}")  # noqa: S311 - a workload, not a secret
    return MixedWorkload(
        sessions=rng.choice((20, 60, 100, 200, 400)),
        choice=rng.choice(CHOICES),
        rewinds=rng.choice((0.0, 0.05, 0.3, 0.6)),
        subagents=rng.choice((0, 0, 3, 9)),
        prompts=rng.choice((1, 3, 5)),
        restarts=rng.choice((0.0, 0.01, 0.1, 0.5)),
        turn_blocks=rng.choice((2, 8, 24)),
        most_blocks=rng.choice((100, 300)),
        phase=rng.choice((None, None, *CHOICES)),
        seed=seed,
    )


def mixed_lines(workload: MixedWorkload) -> Iterator[bytes]:
    """Yield the trace line by line; the same workload gives the same bytes everywhere."""
    rng = random.Random(workload.seed)  # noqa: S311 - a workload, not a secret
    ids = FreshBlocks()
    half = workload.requests // 2 if workload.phase else workload.requests
    number = 0
    for count, choice in ((half, workload.choice), (workload.requests - half, workload.phase)):
        if not count or choice is None:
            continue
        crowd = _Crowd(workload, rng, ids)
        for place in _places(choice, workload.sessions, count, rng):
            blocks = crowd.next_prompt(place)
            line: dict[str, object] = {
                "timestamp": number * 1_000,
                "session_id": place,
                "input_length": len(blocks) * BLOCK_TOKENS,
                "output_length": 1,
                "hash_ids": blocks,
            }
            if number == 0:
                line["seed"] = workload.seed
            number += 1
            yield msgspec.json.encode(line, order="sorted") + b"\n"


def _places(choice: str, sessions: int, count: int, rng: random.Random) -> Iterator[int]:
    """Yield which session comes next, `count` times."""
    place, left = 0, 0
    total = sum(1 / (n + 1) for n in range(sessions))
    for number in range(count):
        if choice == "cycle":
            place = number % sessions
        elif choice == "zipf":
            draw = rng.random() * total
            place = 0
            while place + 1 < sessions and (draw := draw - 1 / (place + 1)) > 0:
                place += 1
        elif choice == "uniform" or left == 0:
            place, left = rng.randrange(sessions), rng.randint(3, 20)
        left -= 1
        yield place


class _Crowd:
    """Sessions at their turns."""

    def __init__(self, workload: MixedWorkload, rng: random.Random, ids: FreshBlocks) -> None:
        self._workload = workload
        self._rng = rng
        self._ids = ids
        self._prompts = [ids.fresh(blocks) for blocks in _PROMPT_BLOCKS[-workload.prompts :]]
        self._context = [self._started() for _ in range(workload.sessions)]
        self._turns: list[list[int]] = [[] for _ in range(workload.sessions)]
        self._out: list[deque[list[int]]] = [deque() for _ in range(workload.sessions)]

    def next_prompt(self, place: int) -> list[int]:
        """Return the prompt of this session's next request, or of one that it sent out."""
        if self._out[place]:
            return self._out[place].popleft()
        workload, rng = self._workload, self._rng
        context = self._context[place]
        prompt = list(context)
        self._turns[place].append(len(context))
        if len(context) > workload.most_blocks or rng.random() < workload.restarts:
            self._context[place] = self._started()
            self._turns[place] = []
            return prompt
        if workload.subagents and rng.random() < 0.2:
            self._send_out(place)
        if rng.random() < workload.rewinds:
            self._rewind(place)
        self._context[place] += self._ids.fresh(rng.randint(1, workload.turn_blocks))
        return prompt

    def _started(self) -> list[int]:
        return [*self._rng.choice(self._prompts), *self._ids.fresh(self._rng.randint(4, 40))]

    def _send_out(self, place: int) -> None:
        for _ in range(self._workload.subagents):
            context = list(self._context[place])
            for _ in range(self._rng.randint(1, 4)):
                context = context + self._ids.fresh(self._rng.randint(2, 5))
                self._out[place].append(context)

    def _rewind(self, place: int) -> None:
        turns = self._turns[place]
        back = max(0, len(turns) - 1 - self._rng.randint(1, 6))
        del self._context[place][max(1, turns[back] - self._rng.randint(0, 1)) :]
        del turns[back + 1 :]
