"""The native index equals the plain-Python reference for any sequence of calls."""

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from support.index_pair import COSTS, DEPTHS, Pair, insert_anywhere, random_event

IDS = st.integers(0, 11)
EXAMPLES, STEPS, EVENTS = 130, 200, 200_000
BURST = 64


class IndexMachine(RuleBasedStateMachine):
    """Single calls, and bursts of calls drawn from one seed, checked after each call."""

    events = 0

    @initialize(policy=st.sampled_from(["gds", "lru", "gds-tips"]), cost=st.sampled_from(COSTS))
    def start(self, policy: str, cost: tuple[float, float]) -> None:
        self.pair = Pair(policy, cost)

    @rule(state=IDS, depth=st.sampled_from(DEPTHS), data=st.data())
    def insert(self, state: int, depth: int, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from([None, *self.pair.resident]))
        below = self.pair.children_of(parent)
        children = data.draw(st.lists(st.sampled_from(below), unique=True)) if below else []
        self.pair.call("insert", state, depth, parent, children)

    @rule(state=IDS, seed=st.integers(0, 2**32))
    def insert_in_place(self, state: int, seed: int) -> None:
        insert_anywhere(self.pair, random.Random(seed), state)

    @rule(name=st.sampled_from(["touch", "pin", "unpin", "erase"]), state=IDS)
    def use(self, name: str, state: int) -> None:
        self.pair.call(name, state)

    @rule(n=st.integers(-1, 4))
    def evict(self, n: int) -> None:
        self.pair.call("evict", n)

    @rule(name=st.sampled_from(["begin_walk", "next_victim", "next_victim", "end_walk"]))
    def walk(self, name: str) -> None:
        self.pair.call(name)

    @precondition(lambda self: self.pair.open_proposals)
    @rule(data=st.data())
    def confirm(self, data: st.DataObject) -> None:
        self.pair.call("evicted", data.draw(st.sampled_from(self.pair.open_proposals)))

    @rule(seed=st.integers(0, 2**32))
    def burst(self, seed: int) -> None:
        """Many calls for each draw, since a draw takes longer than a call."""
        rng = random.Random(seed)
        for _ in range(BURST):
            random_event(self.pair, rng, states=12)
            self.pair.check()

    @rule(state=IDS)
    def confirm_any(self, state: int) -> None:
        self.pair.call("evicted", state)

    @invariant()
    def same(self) -> None:
        if hasattr(self, "pair"):
            self.pair.check()

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            type(self).events += self.pair.events


def test_any_sequence_of_calls(share: float) -> None:
    IndexMachine.events = 0
    IndexMachine.TestCase.settings = settings(
        max_examples=int(EXAMPLES * share),
        stateful_step_count=STEPS,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    IndexMachine.TestCase("runTest").runTest()
    print(f"{IndexMachine.events} events")
    assert IndexMachine.events >= (EVENTS if share == 1 else EVENTS * share * 0.9)


@pytest.mark.parametrize(
    ("seed", "events"), [(0, 1_000_000), (1, 100_000), (2, 100_000), (3, 100_000), (4, 200_000)]
)
def test_long_run(seed: int, events: int, share: float) -> None:
    """Seeded calls on more states, so deeper heaps and trees; every victim compared."""
    rng = random.Random(seed)
    pair = Pair({3: "lru", 4: "gds-tips"}.get(seed, "gds"), COSTS[seed % len(COSTS)])
    for step in range(int(events * share)):
        random_event(pair, rng, states=48)
        if step % 500 == 0:
            pair.check()
    pair.check()
    assert pair.events >= events * share
