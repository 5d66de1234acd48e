"""The driver of `statecache ab` on vLLM's real scheduler, against the built-in replay."""

import sys
from pathlib import Path

from statecache.ab.arms import Arm
from statecache.ab.bench import Bench
from statecache.ab.drivers.cache_layer_protocol import Job
from statecache.ab.drivers.trace_replay import TraceReplay
from statecache.ab.trial import Cell, Trial
from statecache.ab.workloads import Workload
from statecache.replay.prefix_tree import PrefixTree
from statecache_vllm.bench.cache_driver import play
from statecache_vllm.seams import engine_version

# One Python by two names, so that there are two processes, each with a hash seed of its own.
PYTHONS = {"a": sys.executable, "b": str(Path(sys.executable).with_name("python3"))}
WORKLOAD = Workload(kind="agent", sessions=6, turns=8)
SCARCE = {"engine": "vllm", "slots": 30, "kv_tokens": 250 * 512}


def played(**settings):
    return play(Job(Arm(name="v", **settings), PrefixTree.of(WORKLOAD.trace(0)).paths))


def test_with_a_state_at_each_block_and_memory_for_all_hits_are_those_of_the_replay():
    """Nothing is ever dropped, so each request resumes where the known prefix ends."""
    ample = {"slots": 20_000, "kv_tokens": 20_000 * 512, "chunk": 512}
    core = TraceReplay(WORKLOAD.trace(0)).play(Arm(name="core", policy="lru", **ample))
    assert sum(request.hit_tokens for request in core.served) > 0
    stock = played(engine="vllm", pool="shared", policy="stock", **ample)
    pooled = played(engine="vllm", pool="native", policy="lru", **ample)
    learned = played(engine="vllm", pool="native", policy="learned", **ample)
    for real in (stock, pooled, learned):
        assert real.served == core.served
    assert (stock.evicted_states, pooled.evicted_states) == (None, 0)


def test_an_arm_leaves_nothing_behind_for_the_next():
    stock = {"pool": "shared", "policy": "stock", "admission": "branch-points", **SCARCE}
    before = played(**stock)
    pooled = played(pool="int8", policy="gds", **SCARCE)
    assert pooled.evicted_states > 0
    assert sum(o.hit_tokens for o in pooled.served) > sum(o.hit_tokens for o in before.served)
    assert played(**stock) == before


def test_learned_chooses_otherwise_and_hits_more_than_lru_where_slots_are_few():
    """The same requests and the same memory; only the order of the slots differs."""
    found = {name: played(pool="int8", policy=name, **SCARCE) for name in ("lru", "gds", "learned")}
    hits = {
        policy: sum(request.hit_tokens for request in of.served) for policy, of in found.items()
    }
    assert hits["learned"] > hits["lru"]
    assert found["learned"].evicted_states not in (0, found["gds"].evicted_states)


def test_what_cannot_fit_is_rejected():
    few = {"engine": "vllm", "slots": 1, "kv_tokens": 40 * 512}
    for request in played(pool="shared", policy="stock", admission="branch-points", **few).served:
        assert request.rejected == (request.prompt_tokens > 35 * 512)
        assert request.hit_tokens <= request.resident_tokens < request.prompt_tokens


def test_in_processes_of_their_own_numbers_repeat():
    arms = [Arm(name=n, policy="gds", python=python, **SCARCE) for n, python in PYTHONS.items()]
    with Bench(
        Trial(name="t", cells=[Cell(name="c", workload=WORKLOAD, arms=arms)], repeats=2)
    ) as bench:
        found = {(run.arm, run.seed): measured for run, measured in bench.runs()}
        assert bench.versions == {"vllm": engine_version()}
    assert found["a", 0] == found["b", 0] != found["a", 1] == found["b", 1]
