"""Long traffic through vLLM's real scheduler and block pool under pressure: flat memory, no drift.

`make soak` runs this file for long; as a test it takes some seconds.
"""

import math
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_models
from drafted import DraftedWorker, conversations
from scheduled import Drafter, Run, traffic, words
from vllm.v1.request import RequestStatus

from statecache_vllm import seams
from support import soak
from support.mtp_head import add_drafter

POOL = {"checkpoints": "native", "checkpoint_slots": 16}
BURSTS = "bursts of siblings"
DRAFTED = {
    "drafter and native pool": (Drafter("mtp", 2), 0.18, 256, 2, POOL),
    "drafter of its own group and pool by learned": (
        Drafter("mtp", 3, own_group=True),
        0.6,
        1024,
        4,
        {**POOL, "policy": "learned"},
    ),
    "ngram and int8 pool": (
        Drafter("ngram", 2),
        0.6,
        8192,
        8,
        {**POOL, "checkpoints": "int8", "checkpoint_interval": 512},
    ),
}  # the drafter, the share it guesses, the tokens of a step, the size of prompts, the settings
KINDS = {
    "reuse and pool": POOL,
    "pool by learned": {**POOL, "policy": "learned"},
    "reuse": {},
    "stock and int8 pool": {"block_policy": "stock", "checkpoints": "int8", "checkpoint_slots": 16},
    BURSTS: {**POOL, "checkpoint_interval": 512},
    **{kind: settings for kind, (*_, settings) in DRAFTED.items()},
}


def bursts(run: Run, seed: int) -> Iterator[None]:
    """Random arrivals of siblings over heads of a few steps, many of them aborted; never ends.

    Raises where nothing is computed although a request could be: everything waits.
    """
    rng = random.Random(seed)
    heads = [words(rng, rng.randint(600, 1400)) for _ in range(3)]
    while True:
        if rng.random() < 0.2 and len(run.scheduler.requests) < 24:
            head = rng.choice(heads)[: rng.choice((400, 900, 1400, 1400))]
            for _ in range(rng.choice((1, 2, 6))):
                run.add([*head, *words(rng, rng.choice((3, 40, 200)))], tokens=rng.randint(1, 4))
            if rng.random() < 0.7:
                heads[rng.randrange(len(heads))] = words(rng, rng.randint(600, 1400))
        for name in list(run.scheduler.requests):
            if rng.random() < 0.01:
                run.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
        if rng.random() < 0.002:
            run.scheduler.reset_prefix_cache(reset_running_requests=True)
        planned = run.step()
        assert planned.num_scheduled_tokens or not run.scheduler.requests, "everything waits"
        yield


def check(run: Run, worker: DraftedWorker | None = None) -> None:
    """The counts of vLLM, the plugin's own invariants, and that both know the same."""
    run.check()
    if worker is not None:
        assert worker.wrong == {}
        worker.forget()
    scheduler_side, pool = run.scheduler_side, run.pool
    assert scheduler_side.faults.anomalies == 0
    assert scheduler_side.queue is not None
    running = set(run.scheduler.requests)
    assert set(scheduler_side.stores.requests) == running
    assert scheduler_side.lookup.known <= running
    assert set(scheduler_side.report._found) <= running
    keys = {block.block_hash for block in pool.blocks} - {None}
    keys |= {key for several in pool.cached_block_hashes_by_block.values() for key in several}
    assert len(pool.cached_block_hash_to_block) == len(keys)
    if scheduler_side.checkpoints is not None:
        scheduler_side.checkpoints.check()
        for state in scheduler_side.checkpoints.tree_states():
            for group in scheduler_side.layout.state_groups:
                key = seams.key_of(scheduler_side.checkpoints.tree.hash_of(state), group)
                assert scheduler_side.parts.block_index.has_checkpoint(key)
    # What the harness itself keeps of requests that ended.
    for kept in (run.cached, run.chunk_ends, run.restores):
        kept.clear()


def soaked(
    model: Path, kind: str, requests: int, seconds: float, every: int = 1_000
) -> soak.Report:
    worker = None
    if kind in DRAFTED:
        drafter, accept, budget, scale, plugin = DRAFTED[kind]
        blocks = 80 * scale
        run = Run(model, blocks=blocks, budget=budget, plugin=plugin, drafter=drafter)
        worker = DraftedWorker(run, drafter.tokens, accept)
        steps = conversations(run, worker, 1, scale=scale)
    elif kind == BURSTS:
        run = Run(model, blocks=500, budget=512, requests=16, plugin=KINDS[kind])
        steps = bursts(run, 1)
    else:
        run = Run(model, blocks=70, plugin=KINDS[kind])
        steps = traffic(run, 1, sys.maxsize)
    report = soak.soak(
        f"vLLM, {kind}",
        steps,
        lambda: run._count,
        lambda: check(run, worker),
        requests=requests,
        seconds=seconds,
        every=every,
    )
    if worker is None:
        assert run.shadow.resumed > report.requests / 50
    else:
        assert min(worker.restores, worker.stores) > report.requests / 50
        print(f"{kind}: {worker}", flush=True)
    waits = run.scheduler_side.report.counts.numbers.get("head_waits", 0)
    assert kind != BURSTS or waits > report.requests / 20
    if run.scheduler_side.checkpoints is not None:
        assert run.scheduler_side.checkpoints.counts.evicted > report.requests / 50
    return report


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_flat_and_nothing_drifts(drafting, kind):
    requests, every = (200, 25) if kind in DRAFTED else (500, 20)
    report = soaked(drafting, kind, requests, math.inf, every=every)
    assert report.checks >= 2
    assert report.growth_mib < report.most_growth_mib


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = add_drafter(tiny_models.make_tiny_model("qwen3_next", Path(folder)))
        soak.main(KINDS, lambda kind, *limits: soaked(model, kind, *limits))


if __name__ == "__main__":
    main()
