"""What the block policy costs vLLM's scheduler: lookup + allocate + free, at 20,000 blocks.

usage: python tests/bench/bench_vllm_queue.py MODEL [ROUNDS]
MODEL is a folder of a hybrid model, of which no weights are used; 48 rounds if not said otherwise.

Every policy serves the same requests on vLLM's real cache manager, in a process of its own; the
processes take turns of 20 requests, and are started anew twice. CPU time. Printed are the
median of the turns, the median of their ratios to vLLM's own queue under the same connector, and
where 90 % of the ratios lie. `stock` leaves vLLM's queue where it is, so its line shows what the
noise is. "Noting states" is what the connector does with the states of a step.
"""

import gc
import itertools
import multiprocessing
import os
import random
import statistics
import sys
import time
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "engines" / "vllm"))

from scheduled import Run, words

BLOCKS, BLOCK = 20_000, 16
PROCESSES, ROUNDS, WARM, TURN = 3, 48, 12, 20  # a turn is so many requests
POLICIES = ["vLLM", "stock", "reuse"]


class Fresh:
    """Prompts of 3,800 tokens with 3,000 shared ones that are not reused: copies, evictions."""

    def __init__(self):
        self.rng = random.Random(0)
        self.shared = [words(random.Random(1), 3000) for _ in range(20)]

    def prompt(self):
        return self.rng.choice(self.shared) + words(self.rng, 800)


class Sessions:
    """40 sessions, each prompt the last one and 160 tokens more: hits, touches, evictions."""

    def __init__(self):
        self.rng = random.Random(0)
        self.open = [[] for _ in range(40)]

    def prompt(self):
        at = self.rng.randrange(len(self.open))
        if len(self.open[at]) + 160 > 3800:
            self.open[at] = []
        self.open[at] = self.open[at] + words(self.rng, 160 if self.open[at] else 1600)
        return self.open[at]


class Served:
    """One policy at work, and what it took."""

    def __init__(self, model, policy, workload):
        plugin = {"block_policy": "stock" if policy == "vLLM" else policy}
        self.run = Run(model, blocks=BLOCKS, plugin=plugin)
        self.workload = workload()
        self.seconds = self.noting = self.reused = 0

    def serve(self, prompt):
        """Look up, allocate as the scheduler does, and free."""
        scheduler = self.run.scheduler
        manager, clock = scheduler.kv_cache_manager, time.thread_time
        request = scheduler.requests[self.run.add(prompt)]
        start = clock()
        blocks, hit, _ = manager.get_computed_blocks(request)
        end = (request.num_tokens - 1) // BLOCK * BLOCK  # a chunk ends where a state is kept
        manager.allocate_slots(request, end - hit, hit, new_computed_blocks=blocks)
        self.step(manager)
        request.num_computed_tokens = end
        manager.allocate_slots(request, request.num_tokens - end)
        self.step(manager)
        self.seconds += clock() - start
        offers = manager.take_boundary_state_offloads()
        start = clock()
        scheduler.connector.scheduler_side.plan(
            types.SimpleNamespace(boundary_state_offloads=offers)
        )
        self.noting += clock() - start
        start = clock()
        manager.free(request)
        self.seconds += clock() - start
        self.reused += hit
        scheduler.connector.request_finished_all_groups(request, ())
        del scheduler.requests[request.request_id]

    def step(self, manager):
        for each in manager.coordinator.single_type_managers:
            each.new_step_starts()

    def turn(self):
        """Serve the next requests; return seconds, seconds of noting states, and reused tokens."""
        gc.collect()
        gc.disable()
        for _ in range(TURN):
            self.serve(self.workload.prompt())
        gc.enable()
        done = self.seconds, self.noting, self.reused
        self.seconds = self.noting = self.reused = 0
        return done


def work(pipe, *what):
    """A process of its own for each policy, as in production: no one else's calls in its caches."""
    served = Served(*what)
    gc.freeze()  # what is there already is not looked at in every collection
    pipe.send(None)
    while pipe.recv():
        pipe.send(served.turn())
    os._exit(0)  # without the pages that vLLM's libraries write about what was not freed


def compare(model, workload, counted):
    rounds = {policy: [] for policy in POLICIES}
    for _ in range(PROCESSES):  # where things lie in memory is another matter of luck
        context = multiprocessing.get_context("spawn")
        pipes = {}
        for policy in POLICIES:
            pipes[policy], theirs = context.Pipe()
            context.Process(
                target=work, args=(theirs, model, policy, workload), daemon=True
            ).start()
        for pipe in pipes.values():
            pipe.recv()
        # Nobody always comes first, or behind the same one, who left the CPU's caches full.
        sequences = list(itertools.permutations(POLICIES))
        random.Random(0).shuffle(sequences)
        for number, sequence in zip(range(WARM + counted), itertools.cycle(sequences)):
            for policy in sequence:
                pipes[policy].send(True)
                done = pipes[policy].recv()
                if number >= WARM:
                    rounds[policy].append(done)
        for pipe in pipes.values():
            pipe.send(False)
    print(f"{workload.__name__}: {workload.__doc__}")
    for policy in POLICIES:
        seconds, noting, reused = zip(*rounds[policy], strict=True)
        ratios = sorted(own[0] / s for own, s in zip(rounds["vLLM"], seconds, strict=True))
        each, noted = (statistics.median(s) / TURN * 1e6 for s in (seconds, noting))
        middle = statistics.median(ratios)
        low, high = ratios[len(ratios) // 20], ratios[-1 - len(ratios) // 20]
        print(
            f"{policy:6} {each:8.1f} us a request, {middle:.3f} of vLLM's throughput"
            f" ({low:.3f}-{high:.3f}), noting states {noted:.1f} us,"
            f" {sum(reused) / (TURN * len(reused)):.0f} tokens reused"
        )


def main(model, counted=ROUNDS):
    for workload in (Fresh, Sessions):
        compare(model, workload, int(counted))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
