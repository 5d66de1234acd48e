"""Prints every slot that leaves the state pool's cache, in order, for one fixed traffic.

eviction_log.py CORE ...    # run by test_determinism.py in several processes
"""

import random
import sys
import time

from cache_layer import Traffic, plugin
from random_traffic import operations, perform

SIZES = {"slots": 24, "kv_tokens": 2_000}
BATCH = 50


def watched(core: str) -> tuple[Traffic, list[str]]:
    with plugin(policy="gds"):
        traffic = Traffic(core, **SIZES)
    log: list[str] = []
    allocator, free = traffic.state_pool, traffic.state_pool.free

    def noted(slots):
        log.append(f"{slots.tolist()}")
        return free(slots)

    allocator.free = noted
    return traffic, log


def inserts_in_ticks(traffic: Traffic) -> None:
    """1,000 requests in batches that share one reading of every clock."""
    rng = random.Random(7)
    real = {name: getattr(time, name) for name in ("time", "monotonic", "perf_counter")}
    roots = [[rng.randrange(9) for _ in range(30)] for _ in range(6)]
    try:
        for number in range(1_000):
            if number % BATCH == 0:
                for name in real:
                    setattr(time, name, lambda tick=float(number): tick)
            root = rng.choice(roots)
            tokens = root[: rng.randint(1, 30)] + [rng.randrange(9)] * rng.randint(0, 9)
            traffic.run_key(traffic.key(tokens))
    finally:
        for name, clock in real.items():
            setattr(time, name, clock)


def main() -> None:
    for core in sys.argv[1:]:
        traffic, log = watched(core)
        inserts_in_ticks(traffic)
        for operation in operations(11, 300):
            perform(traffic, operation)
        traffic.check()
        print(core, *log, sep="\n")


if __name__ == "__main__":
    main()
