"""Cost of the state index through Python, beside a heap rebuilt at each eviction walk.

A round is 100 calls (300 for `amortised`: 100 each of evict, insert and touch), so a median in
microseconds is a cost in hundredths of a microsecond a call. The command is in README.md here.
"""

import heapq
import random

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from statecache import StateIndex

SIZES = [1_000, 10_000, 100_000, 1_000_000]
BATCH = 100
ROUNDS = 200


class Sessions:
    """Chains that grow by a few hundred tokens, used at random, evicted when full."""

    def __init__(self, states: int) -> None:
        self.index = StateIndex("gds")
        self._states = states
        self._rng = random.Random(7)
        self._tips: list[tuple[int, int] | None] = [None] * (states // 8 + 1)
        self._last = 0
        while len(self.index) < states:
            self.plan_growth()
            self.grow()
        for _ in range(states // BATCH):
            self.plan_uses()
            self.use()

    def plan_growth(self) -> None:
        self._growth: list[tuple[int, int, int | None]] = []
        for session in self._rng.sample(range(len(self._tips)), BATCH):
            tip = self._tips[session]
            parent, depth = tip if tip and tip[0] in self.index else (None, 0)
            self._last += 1
            self._growth.append((self._last, depth + self._rng.randrange(400, 656), parent))
            self._tips[session] = self._growth[-1][:2]

    def plan_uses(self) -> None:
        tips = (self._rng.choice(self._tips) for _ in range(20 * BATCH))
        self._uses = [tip[0] for tip in tips if tip and tip[0] in self.index][:BATCH]

    def evict(self) -> None:
        for _ in range(BATCH):
            self.index.evict(1)

    def grow(self) -> None:
        for state, depth, parent in self._growth:
            self.index.insert(state, depth, parent)

    def use(self) -> None:
        for state in self._uses:
            self.index.touch(state)

    def round(self) -> None:
        self.use()
        self.evict()
        # A parent may just have gone: then its session starts again.
        for state, depth, parent in self._growth:
            alive = parent is not None and parent in self.index
            self.index.insert(state, depth, parent if alive else None)


@pytest.fixture(scope="module", params=SIZES)
def sessions(request: pytest.FixtureRequest) -> Sessions:
    return Sessions(request.param)


def test_insert(benchmark: BenchmarkFixture, sessions: Sessions) -> None:
    def setup() -> None:
        sessions.evict()
        sessions.plan_growth()

    benchmark.pedantic(sessions.grow, setup=setup, rounds=ROUNDS)


def test_touch(benchmark: BenchmarkFixture, sessions: Sessions) -> None:
    benchmark.pedantic(sessions.use, setup=sessions.plan_uses, rounds=ROUNDS)


def test_evict(benchmark: BenchmarkFixture, sessions: Sessions) -> None:
    def setup() -> None:
        sessions.plan_growth()
        sessions.grow()
        sessions.plan_uses()
        sessions.use()

    benchmark.pedantic(sessions.evict, setup=setup, rounds=ROUNDS)


def test_amortised(benchmark: BenchmarkFixture, sessions: Sessions) -> None:
    def setup() -> None:
        sessions.plan_growth()
        sessions.plan_uses()

    benchmark.pedantic(sessions.round, setup=setup, rounds=ROUNDS)


@pytest.mark.parametrize("states", SIZES)
def test_heapify_at_each_walk(benchmark: BenchmarkFixture, states: int) -> None:
    rng = random.Random(7)
    entries = [(rng.random(), n, n) for n in range(states)]
    benchmark.pedantic(lambda: heapq.heapify(entries.copy()), rounds=5)
