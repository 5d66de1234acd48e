"""Replay the whole grid of published numbers, each policy in a process of its own, and time it.

    python tests/bench/replay_grid.py TRACES [--policy lru --policy gds] [--limit-s 10]

TRACES is the folder of the recorded traces. Exit code 1 when a number differs or time ran over.
"""

import argparse
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from statecache.replay.kv_residency import kv_timeline
from statecache.replay.prefix_tree import PrefixTree
from statecache.replay.schedule import make_schedule
from statecache.replay.state_slots import replay
from statecache.trace.format import read_trace

PUBLISHED = json.loads(Path(__file__).parents[1].joinpath("golden/published.json").read_bytes())
Cell = tuple[str, str, str, int]


def play_policy(policy: str, traces: Path) -> tuple[float, dict[Cell, float]]:
    """Return the seconds of the whole grid under one policy, and its hit rates."""
    started = time.perf_counter()
    rates: dict[Cell, float] = {}
    for name, limit in PUBLISHED["requests"].items():
        tree = PrefixTree.of(read_trace(str(traces / f"{name}.jsonl.gz"), limit=limit))
        kv = kv_timeline(tree, None)
        for admission in ("dense", "ends"):
            schedule = make_schedule(tree, kv, admission)
            for slots in PUBLISHED["slots"]:
                row = replay(schedule, policy, slots)
                rates[name, admission, policy, slots] = row.hit_tokens / row.prompt_tokens
    return time.perf_counter() - started, rates


def differences(rates: dict[Cell, float]) -> list[str]:
    found = []
    for name, admission, policy, slots, expected in PUBLISHED["hit_rates"]:
        rate = rates.get((name, admission, policy, slots))
        if rate is not None and round(rate, 4) != expected:
            found.append(f"{name} {admission} {policy} {slots}: {rate:.4f}, not {expected}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--policy", action="append", choices=["lru", "gds", "clairvoyant"])
    parser.add_argument("--limit-s", type=float, default=10.0)
    settings = parser.parse_args()
    policies = settings.policy or ["lru", "gds"]
    started = time.perf_counter()
    with ProcessPoolExecutor(len(policies), mp_context=get_context("spawn")) as pool:
        played = list(pool.map(play_policy, policies, [settings.traces] * len(policies)))
    wall_s = time.perf_counter() - started
    rates = {cell: rate for _, part in played for cell, rate in part.items()}
    for policy, (seconds, part) in zip(policies, played, strict=True):
        sys.stdout.write(f"{policy}: {len(part)} cells in {seconds:.2f} s\n")
    sys.stdout.write(f"wall: {wall_s:.2f} s, {len(policies)} processes\n")
    found = differences(rates)
    for line in found:
        sys.stdout.write(line + "\n")
    return 1 if found or wall_s > settings.limit_s else 0


if __name__ == "__main__":
    sys.exit(main())
