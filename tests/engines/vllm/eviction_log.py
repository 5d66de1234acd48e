"""Prints which blocks are handed out, what is cached, and the slots of the pool, step by step.

eviction_log.py MODEL KIND ...    # run by test_determinism.py in several processes
"""

import random
import sys
from pathlib import Path

from scheduled import Run, traffic, words

KINDS = {
    "stock": {"block_policy": "stock"},
    "reuse": {},
    "pool": {"checkpoints": "native", "checkpoint_slots": 16},
}


def main() -> None:
    model = Path(sys.argv[1])
    for kind in sys.argv[2:]:
        run = Run(model, blocks=70, plugin=KINDS[kind])
        log = [f"{kind}"]
        get_new_blocks = run.pool.get_new_blocks

        def noted(count, log=log, get_new_blocks=get_new_blocks):
            blocks = get_new_blocks(count)
            log.append(f"{[block.block_id for block in blocks]}")
            return blocks

        run.pool.get_new_blocks = noted
        in_batches(run, log)
        for _ in traffic(run, 3, 200):
            note_states(run, log)
        run.check()
        assert run.scheduler_side.faults.anomalies == 0
        print(len(log), *log, sep="\n")


def in_batches(run: Run, log: list[str]) -> None:
    """1,000 requests, eight of which arrive and are admitted in one step."""
    rng = random.Random(5)
    prefixes = [words(rng, 64) for _ in range(12)]
    for _ in range(125):
        for _ in range(8):
            prompt = rng.choice(prefixes)[: 16 * rng.randint(1, 4)] + words(rng, rng.randint(1, 9))
            run.add(prompt, arrival_time=0.0)
        run.finish()
        note_states(run, log)


def note_states(run: Run, log: list[str]) -> None:
    checkpoints = run.scheduler_side.checkpoints
    if checkpoints is not None:
        log.append(f"{sorted(checkpoints._slot.items())}")


if __name__ == "__main__":
    main()
