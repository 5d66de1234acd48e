"""Random operations that several caches can run in step."""

from __future__ import annotations

import random
from collections.abc import Iterator

NAMESPACES = ({}, {"extra_key": "lora-a"}, {"cache_salt": "salt"})


def operations(seed: int, count: int) -> Iterator[tuple]:
    """Yield (method of Traffic, arguments, namespace): forks, resends, prefixes of one another."""
    rng = random.Random(seed)
    known: list[list[int]] = [[rng.randrange(9) for _ in range(20)] for _ in range(4)]
    held = 0
    for _ in range(count):
        tokens = rng.choice(known)
        if rng.random() < 0.6:
            cut = rng.randint(1, len(tokens))
            tokens = tokens[:cut] + [rng.randrange(9) for _ in range(rng.randint(0, 30))]
        if len(tokens) > 150:
            tokens = tokens[: rng.randint(1, 150)]
        known.append(tokens)
        if len(known) > 30:
            known.pop(rng.randrange(len(known)))
        space = rng.choice(NAMESPACES)
        kind = rng.random()
        if kind < 0.45:
            yield "run", (tokens,), space
        elif kind < 0.60:
            yield "run", (tokens, rng.randint(2, 3)), space
        elif kind < 0.75:
            yield "hit", (tokens,), space
        elif kind < 0.82:
            yield "abort", (tokens,), space
        elif kind < 0.88 and held < 6:
            held += 1
            yield "hold", (tokens,), space
        elif kind < 0.94 and held:
            held -= 1
            yield "let_go", (rng.randint(0, held),), {}
        elif kind < 0.97:
            yield "evict", (rng.randint(1, 3), 0), {}
        elif kind < 0.999:
            yield "evict", (0, rng.randint(1, 60)), {}
        else:
            held = 0
            yield "flush", (), {}


def host_operations(seed: int, count: int) -> Iterator[tuple]:
    """The same with a host tier: its copies are noted late, and it is under pressure too."""
    rng = random.Random(seed)
    for operation in operations(seed, count):
        yield operation
        kind = rng.random()
        if kind < 0.40:
            yield "events", (), {}
        elif kind < 0.44:
            yield "evict_host", (rng.randint(1, 2), 0), {}
        elif kind < 0.47:
            yield "evict_host", (0, rng.randint(1, 40)), {}


def perform(traffic, operation):
    method, arguments, namespace = operation
    return getattr(traffic, method)(*arguments, **namespace)
