"""What is reused with a drafter and without one, by policy, on SGLang's cache layer.

PYTHONPATH=tests/engines/sglang/standins .venv-engines/bin/python -W ignore \\
  tests/engines/sglang/speculative_sessions.py    # prints the table of docs/sglang.md
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator

from cache_layer import plugin
from speculative_loop import SpeculativeLoop
from speculative_parts import build, speculating

POLICIES = {
    "SGLang alone": {},
    "lru": {"policy": "lru"},
    "gds": {"policy": "gds"},
    "gds-tips": {"policy": "gds-tips"},
    "learned": {"policy": "learned"},
}
SEEDS = {"no_buffer": (1, 2, 3), "extra_buffer": (1,)}
SIZES = {"slots": 48, "kv_tokens": 64 * 256, "rows": 8}
HALF = {"slots": 24, "kv_tokens": 32 * 256, "rows": 6}


def agents(rng: random.Random, sessions: int = 14, turns: int = 12) -> Iterator[tuple[int, list]]:
    """Sessions that begin with one of three heads; which one goes on next is drawn."""
    fresh = iter(range(1_000, 1 << 40))
    heads = [[next(fresh) for _ in range(rng.randint(200, 500))] for _ in range(3)]
    left = dict.fromkeys(range(sessions), turns)
    while left:
        session = rng.choice(list(left))
        begun = left[session] < turns
        yield (
            session,
            ([] if begun else rng.choice(heads))
            + [next(fresh) for _ in range(rng.randint(5, 150))],
        )
        left[session] -= 1
        if not left[session]:
            del left[session]


def latest(rng: random.Random, requests: int = 170) -> Iterator[tuple[int, list]]:
    """Each request goes on with one of the latest twelve chats, or begins a new one."""
    fresh = iter(range(1_000, 1 << 40))
    chats: list[int] = []
    for _ in range(requests):
        begins = not chats or rng.random() < 0.3
        chat = len(chats) and max(chats) + 1 if begins else rng.choice(chats[-12:])
        chats.append(chat)
        yield chat, [next(fresh) for _ in range(rng.randint(20, 200))]


WORK = {
    "agents": (agents, SIZES),
    "latest twelve chats": (latest, SIZES),
    "latest twelve chats, half the memory": (latest, HALF),
}


def share(work: str, policy: dict, buffer: str, drafter: bool, seed: int) -> float:
    """Share of the prompts' tokens that is reused; at most three requests run at a time."""
    rng = random.Random(seed)
    requests, sizes = WORK[work]
    page = 1 if buffer == "no_buffer" else 64
    histories: dict[int, list[int]] = {}
    with plugin(**policy):
        traffic = build("rust", buffer, page, **sizes)
        with speculating(buffer):
            loop = SpeculativeLoop(traffic, random.Random(seed), drafter=drafter)
            loop._draw = lambda: loop.rng.randint(5, 9)
            running: dict[str, int] = {}
            for session, more in requests(rng):
                while session in running.values() or len(running) > 2:
                    loop.step()
                    for req in loop.served:  # twice where its next step was launched already
                        if req.rid in running:
                            histories[running.pop(req.rid)] = [
                                *req.origin_input_ids,
                                *req.output_ids_through_stop,
                            ]
                    loop.served.clear()
                prompt = [*histories.get(session, []), *more][-3_500:]
                running[loop.ask(prompt, rng.randint(10, 60)).rid] = session
            loop.run()
            traffic.check()
    assert loop.wrong == 0
    return loop.reused / loop.prompts


def main() -> None:
    """Print the share in percent, the mean of the seeds, without a drafter and with one."""
    sys.stdout.write("| traffic, strategy | " + " | ".join(POLICIES) + " |\n")
    for name in WORK:
        for buffer, seeds in SEEDS.items():
            cells = []
            for policy in POLICIES.values():
                means = [
                    sum(100 * share(name, policy, buffer, drafter, seed) for seed in seeds)
                    / len(seeds)
                    for drafter in (False, True)
                ]
                cells.append(f"{means[0]:.1f} / {means[1]:.1f}")
            sys.stdout.write(f"| {name}, {buffer} | " + " | ".join(cells) + " |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
