"""`learned` and its plain form take the same victims, through any calls."""

import random

import pytest

from learned_pair import LearnedPair, PromptTree, disturb, serve_prompt

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
