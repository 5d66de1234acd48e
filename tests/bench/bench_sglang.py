"""Turns a second on SGLang's real cache layer, with and without the plugin, on both tree cores.

64 sessions over 4 system prompts of 2,000 tokens, +500 tokens a turn, begun anew past 20,000;
400 state slots. A turn is what the scheduler asks of the cache: match, lock, a state slot and KV
slots with whatever has to be evicted for them, insert, unlock. All caches run in one process and
take each turn one after the other, so that a busy machine slows all alike; time is the CPU time of
the thread. Run it with the Python of the engines' environment:

    .venv-engines/bin/python tests/bench/bench_sglang.py
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

LAYER = Path(__file__).parents[1] / "engines" / "sglang"
sys.path.insert(0, str(LAYER / "standins"))
sys.path.append(str(LAYER))
warnings.simplefilter("ignore")

from cache_layer import CORES, Traffic, plugin  # noqa: E402

SESSIONS, TURN_TOKENS, RESTART_TOKENS, SLOTS, KV_TOKENS = 64, 500, 20_000, 400, 1_000_000
BLOCK = 250


def turns(count: int) -> Iterator[list[int]]:
    rng = random.Random(0)
    system = [[1_000_000 * (s + 1) + i for i in range(2_000)] for s in range(4)]
    sessions: dict[int, list[int]] = {}
    for turn in range(count):
        number = rng.randrange(SESSIONS)
        tokens = sessions.get(number, [])
        if not tokens or len(tokens) > RESTART_TOKENS:
            tokens = system[number % 4]
        fresh = 50_000_000 + turn * TURN_TOKENS
        sessions[number] = tokens + list(range(fresh, fresh + TURN_TOKENS))
        yield sessions[number]


class Timed:
    def __init__(self, core: str, policy: str) -> None:
        self.name = f"{core} {policy}"
        with plugin(**({} if policy == "off" else {"policy": policy})):
            self.traffic = Traffic(core, slots=SLOTS, kv_tokens=KV_TOKENS)
        self.block_seconds: list[float] = []
        self.seconds = 0.0
        self.hits = 0
        self.hit_hash = 0

    def turn(self, tokens: list[int]) -> None:
        prepared = self.traffic.key(tokens)
        began = time.thread_time()
        hit = self.traffic.run_key(prepared)
        self.seconds += time.thread_time() - began
        self.hits += hit
        self.hit_hash = hash((self.hit_hash, hit))


def report(all_timed: list[Timed], tokens: int) -> None:
    base = {core: next(t for t in all_timed if t.name == f"{core} off") for core in CORES}
    out = ["| core and policy | turns/s | against the core alone | range | tokens reused |"]
    out.append("|---|---|---|---|---|")
    for timed in all_timed:
        alone = base[timed.name.split()[0]].block_seconds
        ratios = [a / b for a, b in zip(alone, timed.block_seconds, strict=True)]
        rate = BLOCK / statistics.median(timed.block_seconds)
        out.append(
            f"| {timed.name} | {rate:,.0f} | {sum(alone) / sum(timed.block_seconds):.3f} |"
            f" {min(ratios):.2f} to {max(ratios):.2f} | {timed.hits / tokens:.1%} |"
        )
    sys.stdout.write("\n".join(out) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=6_000)
    count = parser.parse_args().turns // BLOCK * BLOCK
    all_timed = [Timed(core, policy) for core in CORES for policy in ("off", "lru", "gds")]
    tokens = 0
    gc.disable()
    for number, turn in enumerate(turns(count), start=1):
        tokens += len(turn)
        start = number % len(all_timed)
        for timed in all_timed[start:] + all_timed[:start]:
            timed.turn(turn)
        if number % BLOCK == 0:
            gc.collect()
            for timed in all_timed:
                if number > count // 4:  # until then the pools are filling
                    timed.block_seconds.append(timed.seconds)
                timed.seconds = 0.0
    for timed in all_timed:
        timed.traffic.check()
    by_policy = {t.name: t.hit_hash for t in all_timed}
    for policy in ("off", "lru", "gds"):
        if by_policy[f"python {policy}"] != by_policy[f"rust {policy}"]:
            raise SystemExit(f"the two cores disagree about what was reused with {policy}")
    report(all_timed, tokens)


if __name__ == "__main__":
    main()
