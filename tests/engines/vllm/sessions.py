"""Growing agent sessions on a scheduler without a model, at one amount of memory in all."""

import random

from scheduled import Run, words

# Pages a state takes: one in each of three groups; in int8 (from fp32) 0.90 of a page in all.
NATIVE, INT8 = 3.0, 0.9


def requests(seed, sessions, turns):
    """Each turn asks with all that came before and something new; sessions take turns at random."""
    rng = random.Random(seed)
    system = words(rng, 320)
    open_sessions = [[0, system + words(rng, rng.randint(60, 160))] for _ in range(sessions)]
    while open_sessions:
        one = rng.choice(open_sessions[:5])
        one[1] = one[1] + words(rng, rng.randint(40, 160))
        yield list(one[1])
        one[0] += 1
        if one[0] == turns:
            open_sessions.remove(one)


def reused(model, pages, plugin=None, slots=0, state_pages=NATIVE, seeds=(0, 1, 2)):
    """Share of prompt tokens served from the cache."""
    hit = total = 0
    for seed in seeds:
        blocks = pages - int(slots * state_pages)
        run = Run(model, blocks=blocks, plugin=plugin, budget=512)
        for prompt in requests(seed, sessions=12, turns=8):
            hit += run.ask(prompt)
            total += len(prompt)
        run.check()
    return hit / total
