"""Generated workloads in the trace format, so that a replay needs no download."""

from __future__ import annotations

import heapq
import random
from typing import TYPE_CHECKING

import msgspec

from statecache.errors import SettingsError
from statecache.trace.format import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["AgentWorkload", "FreshBlocks", "agent_lines"]

SYSTEM_PROMPTS_TOKENS = (6_656, 9_728, 14_336, 21_504)
MAX_CONTEXT_TOKENS = 100_000
REWIND_SHARE = 0.07


class AgentWorkload(msgspec.Struct, frozen=True):
    """Coding-agent sessions: how many, how many turns each on average, and the seed."""

    sessions: int = 64
    turns: int = 40
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("sessions", "turns"):
            if not 1 <= getattr(self, name) <= 100_000:
                raise SettingsError(f"{name} is {getattr(self, name)}: give 1 to 100000")
        if not 0 <= self.seed < 2**63:
            raise SettingsError(f"seed is {self.seed}: give 0 to {2**63 - 1}")


def agent_lines(workload: AgentWorkload) -> Iterator[bytes]:
    """Yield the trace line by line, in the order of its timestamps.

    A session starts from one of a few shared system prompts and grows turn by turn, each prompt
    going on from the one before and its answer. About 7 % of turns rewind: they go back to a point
    inside their context and take another way from there. At about 100,000 tokens a session goes
    back to its system prompt and a summary. Sessions start spread over time and pause between
    turns, now and then for long. The same workload gives the same bytes everywhere. The first line
    names the seed.
    """
    rng = random.Random(workload.seed)  # noqa: S311 - a workload, not a secret
    ids = FreshBlocks()
    prompts = [ids.fresh(tokens // BLOCK_TOKENS) for tokens in SYSTEM_PROMPTS_TOKENS]
    due: list[tuple[int, int, _Session]] = []
    for number in range(workload.sessions):
        session = _Session(rng, ids, list(_pick_prompt(rng, prompts)), workload.turns)
        starts_ms = int(rng.random() * 6_000 * workload.sessions)
        due.append((starts_ms, number, session))
    heapq.heapify(due)
    seed: int | None = workload.seed
    while due:
        now_ms, number, session = heapq.heappop(due)
        line = session.next_turn() | {"timestamp": now_ms, "session_id": number}
        if seed is not None:
            line["seed"] = seed
            seed = None
        yield msgspec.json.encode(line, order="sorted") + b"\n"
        if session.turns_left:
            heapq.heappush(due, (now_ms + session.pause_ms(), number, session))


def _pick_prompt(rng: random.Random, prompts: list[list[int]]) -> list[int]:
    """Choose the first prompt half of the time, the second half of the rest, and so on."""
    for prompt in prompts[:-1]:
        if rng.random() < 0.5:
            return prompt
    return prompts[-1]


class FreshBlocks:
    """Hands out block ids that no one else has."""

    def __init__(self) -> None:
        self._next = 0

    def fresh(self, blocks: int) -> list[int]:
        """Return so many ids."""
        first = self._next
        self._next += blocks
        return list(range(first, self._next))


class _Session:
    """One agent session: its context in whole blocks, and the tokens beyond the last one."""

    def __init__(
        self, rng: random.Random, ids: FreshBlocks, system_prompt: list[int], mean_turns: int
    ) -> None:
        self._rng = rng
        self._ids = ids
        self._system_blocks = len(system_prompt)
        self._context = system_prompt
        self._partial_tokens = 0
        self.turns_left = max(1, round(mean_turns * (0.4 + 1.2 * rng.random())))
        # The task at hand and the files first read.
        self._grow(2_000 + int(30_000 * rng.random() ** 2))

    def next_turn(self) -> dict[str, object]:
        """Return the request of this turn; afterwards the context holds its answer too."""
        self.turns_left -= 1
        input_tokens = len(self._context) * BLOCK_TOKENS + self._partial_tokens
        output_tokens = _spread(self._rng, mean=350, most=4_000)
        request: dict[str, object] = {
            "input_length": input_tokens,
            "output_length": output_tokens,
            "hash_ids": list(self._context),
        }
        if self._rng.random() < REWIND_SHARE:
            self._rewind()
        else:
            self._grow(output_tokens)
        self._grow(_spread(self._rng, mean=1_600, most=16_000))
        if len(self._context) * BLOCK_TOKENS > MAX_CONTEXT_TOKENS:
            self._compact()
        return request

    def pause_ms(self) -> int:
        """Return the time to the next turn: a tool's run, or sometimes a person's thinking."""
        mean_ms = 180_000 if self._rng.random() < 0.08 else 12_000
        return 1_000 + _spread(self._rng, mean_ms, 20 * mean_ms)

    def _grow(self, tokens: int) -> None:
        total = self._partial_tokens + tokens
        self._context += self._ids.fresh(total // BLOCK_TOKENS)
        self._partial_tokens = total % BLOCK_TOKENS

    def _rewind(self) -> None:
        """Go back to a point of the context, near its end more often than not."""
        own_blocks = len(self._context) - self._system_blocks
        dropped = min(own_blocks, 1 + int(own_blocks * self._rng.random() ** 3))
        self._context = self._context[: len(self._context) - dropped]
        self._partial_tokens = 0

    def _compact(self) -> None:
        """Keep the system prompt and go on from a summary of the rest."""
        self._context = self._context[: self._system_blocks]
        self._partial_tokens = 0
        self._grow(2_000 + int(4_000 * self._rng.random()))


def _spread(rng: random.Random, mean: int, most: int) -> int:
    """Draw from a skewed distribution: mostly small, sometimes many times the mean.

    Built from products of uniform draws, which every platform rounds alike, unlike logarithms.
    """
    draw = 5 * rng.random() * rng.random() * rng.random() / (rng.random() + 0.25)
    return 1 + min(most, int(mean * draw))
