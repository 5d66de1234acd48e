"""Who waits for whom, worked by hand: a token costs 1, and a wait must save 10 of them."""

import random
from array import array

import pytest

from statecache import CostModel
from statecache.engine.metrics import EventCounters
from statecache.engine.shared_heads import LEAST_TOKENS, Prompt, SharedHeads, common_tokens

HEAD = list(range(100))


class Request:
    """A request of some engine."""


def prompt(*tail: int, head: int = 100, namespace: str = "") -> Prompt:
    return Prompt(array("q", [*HEAD[:head], *tail]), namespace)


def heads(least: int = 10, cost: CostModel | None = None) -> SharedHeads:
    return SharedHeads(cost or CostModel(1, 0), least=least)


def everything_runs(_request: object) -> bool:
    return True


def nothing_runs(_request: object) -> bool:
    return False


def test_a_sibling_waits_for_the_head_and_then_goes_on() -> None:
    found, first, second = heads(), Request(), Request()
    found.computing(first, prompt(1, 2), 0, [60, 100, 102])
    ask = (second, prompt(3, 4), 0, everything_runs)
    assert found.should_wait(*ask)
    found.computed(first, 102)
    assert not found.should_wait(second, prompt(3, 4), 100, everything_runs)


def test_nobody_waits_where_nothing_runs() -> None:
    found, first, second = heads(), Request(), Request()
    assert not found.should_wait(second, prompt(3), 0, everything_runs)
    found.computing(first, prompt(1), 0, [100])
    assert not found.should_wait(second, prompt(3), 0, nothing_runs)


def test_a_request_waits_once() -> None:
    """Its first producer is aborted; it then goes on, whoever computes the head next."""
    found, first, second, third = heads(), Request(), Request(), Request()
    found.computing(first, prompt(1), 0, [100])
    assert found.should_wait(second, prompt(3), 0, everything_runs)
    found.gone(first)
    found.computing(third, prompt(2), 0, [100])
    assert not found.should_wait(second, prompt(3), 0, everything_runs)
    assert not found.should_wait(second, prompt(3), 0, everything_runs)
    assert found.should_wait(Request(), prompt(4), 0, everything_runs)


@pytest.mark.parametrize("end", ["gone", "computed", "stopped", "collected"])
def test_a_request_whose_producer_ends_goes_on_at_once(end: str) -> None:
    found, first, second = heads(), Request(), Request()
    found.computing(first, prompt(1), 0, [100])
    assert found.should_wait(second, prompt(3), 0, everything_runs)
    if end == "gone":
        found.gone(first)
    elif end == "computed":  # it left no state at 100
        found.computed(first, 100)
    elif end == "collected":
        del first
    runs = nothing_runs if end == "stopped" else everything_runs
    assert not found.should_wait(second, prompt(3), 0, runs)


@pytest.mark.parametrize(
    ("at", "hit", "waits"),
    [
        (0, 0, True),  # as far: 100 once, and not twice
        (40, 0, True),  # nearer
        (0, 40, False),  # 60 by itself, 100 for the other one
        (0, 91, False),  # 9 to go are not worth a wait
        (95, 90, True),  # 10 are
        (0, 100, False),
    ],
)
def test_what_is_cheaper_decides(at: int, hit: int, waits: bool) -> None:
    found, first = heads(), Request()
    found.computing(first, prompt(1), at, [100])
    assert found.should_wait(Request(), prompt(3), hit, everything_runs) is waits


def test_the_cost_model_decides() -> None:
    """By length 40 to 100 costs less than 30 to 100 does; either is worth more than 0 to 50."""
    for cost in (CostModel(1, 0), CostModel(0, 1)):
        found, first = heads(50, cost), Request()
        found.computing(first, prompt(1), 40, [100])
        assert found.should_wait(Request(), prompt(3), 30, everything_runs)
    # From 90 on 10 are left: less than 50, but 1,900 by the square, and 0 to 40 is 1,600.
    for cost, waits in ((CostModel(1, 0), False), (CostModel(0, 1), True)):
        found, first = heads(40, cost), Request()
        found.computing(first, prompt(1), 90, [100])
        assert found.should_wait(Request(), prompt(3), 90, everything_runs) is waits


def test_only_a_state_of_the_common_tokens_is_waited_for() -> None:
    found, first = heads(), Request()
    found.computing(first, prompt(1), 0, [60])
    assert not found.should_wait(Request(), prompt(1, head=50), 0, everything_runs)
    assert found.should_wait(Request(), prompt(1, head=60), 0, everything_runs)
    # The last token of a prompt is always computed: with 60 tokens, 59 can be resumed from.
    assert not found.should_wait(Request(), prompt(head=60), 0, everything_runs)
    assert found.should_wait(Request(), prompt(head=61), 0, everything_runs)


def test_namespaces_have_nothing_in_common() -> None:
    found, first = heads(), Request()
    found.computing(first, prompt(1, namespace="adapter"), 0, [100])
    assert not found.should_wait(Request(), prompt(3), 0, everything_runs)
    assert found.should_wait(Request(), prompt(3, namespace="adapter"), 0, everything_runs)


def test_the_next_step_of_the_same_request_is_waited_for_too() -> None:
    """Steps of 50: the states at 50 and 100 belong to one wait."""
    found, first, second = heads(), Request(), Request()
    its, other = prompt(1), prompt(3)
    found.computing(first, its, 0, [50])
    assert found.should_wait(second, other, 0, everything_runs)
    found.computed(first, 50)
    found.computing(first, its, 50, [100])
    assert found.should_wait(second, other, 50, everything_runs)
    found.computed(first, 100)
    found.computing(first, its, 100, [101])
    assert not found.should_wait(second, other, 100, everything_runs)


def test_waits_are_counted() -> None:
    """Two wait from 20 on: one two steps, for 80 tokens; the other one step, for nothing."""
    counts = EventCounters()
    found = SharedHeads(CostModel(1, 0), counts, least=10)
    first, second, third = Request(), Request(), Request()
    its = prompt(1)
    found.computing(first, its, 20, [50])
    assert found.should_wait(second, prompt(3), 20, everything_runs)
    assert found.should_wait(third, prompt(4), 20, everything_runs)
    found.computed(first, 50)
    found.computing(first, its, 50, [100])
    assert found.should_wait(second, prompt(3), 50, everything_runs)
    assert not found.should_wait(third, prompt(4), 20, nothing_runs)
    found.admitted(third, 20)
    found.computed(first, 100)
    assert not found.should_wait(second, prompt(3), 100, everything_runs)
    found.admitted(second, 100)
    found.admitted(second, 102)  # preempted, and back
    found.admitted(first, 50)
    assert counts.numbers["head_waits"] == 2
    assert counts.numbers["head_wait_steps"] == 3
    assert counts.numbers["head_wait_saved_tokens"] == 80


def queue(*prompts: Prompt) -> list[tuple[object, Prompt]]:
    return [(Request(), asked) for asked in prompts]


def test_a_step_ends_where_siblings_part() -> None:
    first, its = Request(), prompt(1, 2)
    assert heads().cut(first, its, 0, 102, queue(prompt(3), prompt(4))) == 100
    # By multiples of 8 it is 96.
    assert heads().cut(first, its, 0, 102, queue(prompt(3)), grid=8) == 96
    # Beyond this step, or of too little use (9 tokens), or of another namespace: nowhere.
    assert heads().cut(first, its, 0, 100, queue(prompt(3))) is None
    assert heads().cut(first, its, 91, 102, queue(prompt(3))) is None
    assert heads().cut(first, its, 0, 102, queue(prompt(3, namespace="x"))) is None
    assert heads().cut(first, its, 0, 102, []) is None


def test_of_several_depths_the_one_that_saves_most() -> None:
    """30 for three is 90, 60 for two 120, 100 for one 100."""
    parts = queue(prompt(7, head=30), prompt(7, head=60), prompt(7))
    assert heads().cut(Request(), prompt(1), 0, 101, parts) == 60
    # 20 more that part at 30: 30 for 23 is 690.
    assert heads().cut(Request(), prompt(1), 0, 101, parts + parts[:1] * 20) == 30


def test_one_that_has_waited_makes_no_cut() -> None:
    found, first, second = heads(), Request(), Request()
    found.computing(first, prompt(1), 0, [100])
    assert found.should_wait(second, prompt(3), 0, everything_runs)
    assert not found.should_wait(second, prompt(3), 0, nothing_runs)
    assert found.cut(Request(), prompt(4), 0, 101, [(second, prompt(3))]) is None


def test_common_tokens() -> None:
    rng = random.Random(3)
    assert LEAST_TOKENS == 512
    for make in (lambda tokens: array("q", tokens), list):
        for most in (0, 1, 63, 64, 65, 300, 1_000):
            for _ in range(20):
                a = [rng.randrange(2) for _ in range(rng.randint(0, most))]
                b = list(a[: rng.randint(0, len(a))])
                b += [rng.randrange(2) for _ in range(rng.randint(0, most))]
                right = next(
                    (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y),
                    min(len(a), len(b)),
                )
                assert common_tokens(make(a), make(b)) == right
