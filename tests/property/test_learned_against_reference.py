"""`learned` and its plain form take the same victims, through any calls."""

import itertools
import random

import pytest

from learned_pair import BLOCK, LearnedPair, PromptTree, disturb, serve_prompt
from statecache.learned_guard import ORDERS

RUNS = [  # seed, events, slots, slots of the guard, ghosts, points, branching
    (0, 60_000, 8, 8, 24, 60, 0.1),
    (1, 60_000, 20, 20, 40, 90, 0.5),
    (2, 40_000, 12, None, 4096, 60, 0.3),
    (3, 36_000, 24, 12, 16, 120, 0.9),  # the guard has fewer slots than the caller uses
    # What planted errors must fail.
    (4, 4_000, 8, 6, 12, 50, 0.3),
    (6, 4_000, 8, 6, 24, 80, 0.5),
]


def test_there_are_enough_events() -> None:
    assert sum(events for _, events, *_ in RUNS) >= 200_000


@pytest.mark.parametrize(("seed", "events", "slots", "guard", "ghosts", "points", "branch"), RUNS)
def test_same_victims(
    seed: int,
    events: int,
    slots: int,
    guard: int | None,
    ghosts: int,
    points: int,
    branch: float,
    share: float,
) -> None:
    rng = random.Random(seed)
    tree = PromptTree(rng, points, branch)
    pair = LearnedPair(guard, ghosts, [(1.862e-5, 3.33e-6), (1.0, 0.0)][seed % 2])
    served = 0
    while pair.events < events * share:
        serve_prompt(pair, tree, rng, slots)
        served += 1
        if rng.random() < 0.05:
            disturb(pair, tree, rng)
        if rng.random() < 0.3:
            tree.grow()
            tree.prune(points)
        if served % (100 if events > 10_000 else 10) == 0:
            pair.check()
    pair.check()
    print(f"{pair.events} events, {served} prompts, {pair.victims} victims, {pair.orders}")
    assert pair.victims > pair.events / 20


def test_same_order_through_phases() -> None:
    """The guard moves home to gds and back, then follows lru from there for a while.

    60 times a deep context between short prompts, as gds likes it; 120 times a prompt that goes on
    after two longer ones, as lru does; then the first again.
    """
    pair = LearnedPair(3, 64)
    fresh = itertools.count(10)
    followed = ["learned"]
    away = False

    def ask(*blocks: int, key: int | None = None) -> int:
        key = next(fresh) if key is None else key
        keys = [key, *(next(fresh) for _ in blocks[1:])]
        depths = [BLOCK * depth for depth in blocks]
        pair.call("request", keys, depths, len(keys) - 1, keys)
        if pair.native.order != followed[-1]:
            followed.append(pair.native.order)
        guard = pair.reference._guard
        nonlocal away
        away |= guard is not None and guard.order != ORDERS[guard._home]
        return key

    for phase, times in (("gds", 60), ("lru", 120), ("gds", 40)):
        for _ in range(times):
            if phase == "gds":
                ask(100, 101, key=1)
                for _ in range(3):
                    ask(1)
            else:
                context = ask(25)
                ask(50)
                ask(75)
                ask(25, 26, key=context)
    assert followed == ["learned", "gds", "learned", "lru", "learned"]
    assert away
