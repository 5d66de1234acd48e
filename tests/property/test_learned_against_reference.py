"""`learned` and its plain form take the same victims, through any calls."""

import itertools
import random

import pytest

from statecache.index.learned_reference import ORDERS
from support.learned_pair import BLOCK, LearnedPair, PromptTree, disturb, serve_prompt

RUNS = [  # seed, events, slots, slots of the shadows, ghosts, points, branching
    (0, 60_000, 8, 8, 24, 60, 0.1),
    (1, 60_000, 20, 20, 40, 90, 0.5),
    (2, 40_000, 12, None, 4096, 60, 0.3),
    (3, 36_000, 24, 12, 16, 120, 0.9),  # the shadows have fewer slots than the caller uses
    # What planted errors must fail.
    (4, 4_000, 8, 6, 12, 50, 0.3),
    (6, 4_000, 8, 6, 24, 80, 0.5),
]


def test_there_are_enough_events() -> None:
    assert sum(events for _, events, *_ in RUNS) >= 200_000


@pytest.mark.parametrize(
    ("seed", "events", "slots", "shadow_slots", "ghosts", "points", "branch"), RUNS
)
def test_same_victims(
    seed: int,
    events: int,
    slots: int,
    shadow_slots: int | None,
    ghosts: int,
    points: int,
    branch: float,
    share: float,
) -> None:
    rng = random.Random(seed)
    tree = PromptTree(rng, points, branch)
    pair = LearnedPair(shadow_slots, ghosts, [(1.862e-5, 3.33e-6), (1.0, 0.0)][seed % 2])
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


PHASES = [  # size of a context, times of each phase, orders followed, homes
    (25, (20, 150, 40), ["learned", "gds", "learned", "lru", "learned"], [0, 1, 0]),
    (40, (20, 100, 60), ["learned", "lru", "learned"], [0, 2, 0]),
    # gds is ahead by less than 1 % in the long run.
    (25, (60, 120, 40), ["learned", "lru", "learned"], [0]),
]


@pytest.mark.parametrize(("size", "times", "followed", "homes"), PHASES)
def test_same_order_through_phases(
    size: int, times: tuple[int, ...], followed: list[str], homes: list[int]
) -> None:
    """The baseline moves, and another order than that of the baseline is active for a while.

    First a deep context between short prompts, as gds likes it; then prompts that go on after two
    longer ones, as lru does; then the first again.
    """
    pair = LearnedPair(3, 64)
    selector = pair.reference._selector
    assert selector is not None
    fresh = itertools.count(10)
    orders, lived, away = ["learned"], [0], False

    def ask(*blocks: int, key: int | None = None) -> int:
        nonlocal away
        key = next(fresh) if key is None else key
        keys = [key, *(next(fresh) for _ in blocks[1:])]
        depths = [BLOCK * depth for depth in blocks]
        pair.call("on_prompt", keys, depths, len(keys) - 1, keys)
        for seen, now in ((orders, pair.native.order), (lived, selector._baseline)):
            if seen[-1] != now:
                seen.append(now)
        away |= pair.native.order != ORDERS[selector._baseline]
        return key

    for phase, count in zip(("gds", "lru", "gds"), times, strict=True):
        for _ in range(count):
            if phase == "gds":
                ask(100, 101, key=1)
                for _ in range(3):
                    ask(1)
            else:
                context = ask(size)
                ask(2 * size)
                ask(3 * size)
                ask(size, size + 1, key=context)
    assert (orders, lived, away) == (followed, homes, True)
