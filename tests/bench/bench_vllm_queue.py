"""What the block order costs vLLM's scheduler: lookup + allocate + free, at 20,000 blocks.

usage: python tests/bench/bench_vllm_queue.py MODEL   (a folder of a hybrid model; no weights used)

Every order serves the same requests on vLLM's real cache manager, in rounds that take turns;
printed is the median of the rounds (CPU time) and of their ratios to vLLM's own queue under the
same connector.
"""

import gc
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "engines" / "vllm"))

from scheduled import Run, words
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

BLOCKS, ROUNDS, REQUESTS = 20_000, 9, 40


def new_run(model, order):
    own = order == "vLLM"
    run = Run(model, blocks=BLOCKS, plugin={"block_order": "stock" if own else order})
    if own:
        blocks = run.pool.free_block_queue.get_all_free_blocks()
        for block in blocks:
            block.prev_free_block = block.next_free_block = None
        run.pool.free_block_queue = FreeKVCacheBlockQueue(blocks)
        run.scheduler.kv_cache_manager.get_computed_blocks = type(
            run.scheduler.kv_cache_manager
        ).get_computed_blocks.__get__(run.scheduler.kv_cache_manager)
    return run


def requests(run, rng, shared):
    names = [run.add(rng.choice(shared) + words(rng, 800)) for _ in range(REQUESTS)]
    return [run.scheduler.requests[name] for name in names]


def one_round(run, asked):
    """Look up, allocate and free every request; returns seconds."""
    manager, connector = run.scheduler.kv_cache_manager, run.scheduler.connector
    gc.collect()
    gc.disable()
    start = time.thread_time()
    for request in asked:
        blocks, hit, _ = manager.get_computed_blocks(request)
        manager.allocate_slots(request, request.num_tokens - hit, hit, new_computed_blocks=blocks)
        manager.free(request)
        manager.take_boundary_state_offloads()
        for one in manager.coordinator.single_type_managers:
            one.new_step_starts()
    taken = time.thread_time() - start
    gc.enable()
    for request in asked:
        connector.request_finished_all_groups(request, ())
        del run.scheduler.requests[request.request_id]
    return taken


def main(model):
    orders = ["vLLM", "stock", "reuse", "gds"]
    runs = {order: new_run(model, order) for order in orders}
    rng = {order: random.Random(0) for order in orders}
    shared = [words(random.Random(1), 3000) for _ in range(20)]
    seconds = {order: [] for order in orders}
    for _ in range(ROUNDS):
        for order, run in runs.items():
            seconds[order].append(one_round(run, requests(run, rng[order], shared)))
    ratios = {
        order: statistics.median(
            own / ours for own, ours in zip(seconds["vLLM"][2:], seconds[order][2:], strict=True)
        )
        for order in orders
    }
    for order in orders:
        each = statistics.median(seconds[order][2:]) / REQUESTS * 1e6
        print(f"{order:6} {each:8.1f} us a request   {ratios[order]:.3f} of vLLM's throughput")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
