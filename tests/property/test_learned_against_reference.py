"""`learned` and its plain form take the same victims, through any calls."""

import itertools
import random

import pytest

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


def test_same_order_through_phases() -> None:
    """Lru becomes active where it is ahead for long, and learned again when it leads.

    First a deep context between short prompts, as gds likes it; then prompts that go on after two
    longer ones, as lru does; then the first again.
    """
    pair = LearnedPair(3, 64)
    fresh = itertools.count(10)
    orders = ["learned"]

    def ask(*blocks: int, key: int | None = None) -> int:
        key = next(fresh) if key is None else key
        keys = [key, *(next(fresh) for _ in blocks[1:])]
        depths = [BLOCK * depth for depth in blocks]
        pair.call("on_prompt", keys, depths, len(keys) - 1, keys)
        if orders[-1] != pair.native.order:
            orders.append(pair.native.order)
        return key

    for phase, count in (("gds", 20), ("lru", 300), ("gds", 40)):
        for _ in range(count):
            if phase == "gds":
                ask(100, 101, key=1)
                for _ in range(3):
                    ask(1)
            else:
                context = ask(40)
                ask(80)
                ask(120)
                ask(40, 41, key=context)
    assert orders == ["learned", "lru", "learned"]


def test_same_victims_in_the_order_of_gds() -> None:
    """Shadows of two slots: that of gds alone keeps -1, which is resumed from 602 times.

    B takes the slot of -1 from learned and lru, C that of B from gds. Then prompts at random, with
    more slots, in the order of gds until learned has made up for it.
    """
    pair = LearnedPair(2, 64)
    for path in ([(-1, 8192), (-2, 9216)], [(-3, 512)]):
        keys, depths = [key for key, _ in path], [depth for _, depth in path]
        pair.call("on_prompt", keys, depths, len(path) - 1, keys)
    for state, depth in ((-1, 8192), (-6, 512)):
        pair.call("insert", state, depth, None, ())
    for admitted in ([-4], *[[]] * 601):
        pair.call("on_prompt", [-1, -4], [8192, 8704], 1, admitted)
    assert pair.native.order == "gds"
    rng = random.Random(7)
    tree = PromptTree(rng, 60, 0.3)
    for served in range(300):
        serve_prompt(pair, tree, rng, 12)
        if served % 10 == 0:
            tree.grow()
            disturb(pair, tree, rng)
            pair.check()
    assert pair.victims > 50
