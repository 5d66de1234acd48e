"""The driver of `statecache ab` on SGLang's real cache, against the built-in replay."""

import sys
from pathlib import Path

import pytest

from statecache.ab.arms import Arm
from statecache.ab.bench import Bench
from statecache.ab.drivers.cache_layer_protocol import Job
from statecache.ab.drivers.trace_replay import TraceReplay
from statecache.ab.trial import Cell, Trial
from statecache.ab.workloads import Workload
from statecache.replay.prefix_tree import PrefixTree
from statecache.replay.schedule import admitted_blocks
from statecache_sglang.bench.cache_driver import play, serve
from statecache_sglang.bench.cache_layer import CacheLayer
from statecache_sglang.seams import engine_version

# One Python by two names, so that there are two processes, each with a hash seed of its own.
PYTHONS = {"a": sys.executable, "b": str(Path(sys.executable).with_name("python3"))}
AMPLE = 2**24


def both(workload: Workload, **settings):
    """Play one arm on the built-in replay and on SGLang's cache."""
    trace = workload.trace(0)
    core = TraceReplay(trace).play(Arm(name="core", **settings))
    arm = Arm(name="sglang", engine="sglang", **settings)
    return core, play(Job(arm, PrefixTree.of(trace).paths))


@pytest.mark.parametrize("policy", ["lru", "gds", "learned", "gds-tips"])
@pytest.mark.parametrize("pool", ["native", "int8"])
@pytest.mark.parametrize("kind", ["distinct-prefixes", "shared-prefix"])
def test_every_request_hits_what_the_replay_says(kind, pool, policy):
    """One state a request, set or used: the models coincide, so does every hit and eviction."""
    core, real = both(
        Workload(kind=kind, count=40, rounds=6),
        policy=policy,
        pool=pool,
        slots=16,
        int8_ratio=1.5,
        kv_tokens=AMPLE,
        admission="aligned",
        chunk=1024,
    )
    assert [served.hit_tokens for served in real.served] == [
        served.hit_tokens for served in core.served
    ]
    assert real.evicted_states == core.evicted_states > 0
    assert real.skipped_states == 0


@pytest.mark.parametrize("admission", ["ends", "dense"])
@pytest.mark.parametrize("policy", ["lru", "gds", "learned"])
def test_agents_hit_nearly_what_the_replay_says(policy, admission):
    """In SGLang the end of a request is no use of its hit, which also is pinned for less long.

    That moves more under learned, whose classes also tell distances in blocks of 512 tokens apart,
    of which one is one token here.
    """
    core, real = both(
        Workload(kind="agent", sessions=16, turns=20),
        policy=policy,
        slots=32,
        kv_tokens=AMPLE,
        admission=admission,
    )
    hit, expected = (sum(served.hit_tokens for served in p.served) for p in (real, core))
    assert hit == pytest.approx(expected, rel=0.02 if policy == "learned" else 0.005)
    # SGLang drops the KV of a leaf with its state, so it never has more of it than the replay.
    pairs = zip(real.served, core.served, strict=True)
    assert all(a.resident_tokens <= b.resident_tokens for a, b in pairs)


def test_stock_is_lru_and_gds_is_not():
    arms = {
        policy: both(
            Workload(kind="agent", sessions=8, turns=10), policy=policy, slots=16, kv_tokens=AMPLE
        )[1]
        for policy in ("lru", "gds")
    }
    trace = Workload(kind="agent", sessions=8, turns=10).trace(0)
    stock = Arm(name="s", engine="sglang", policy="stock", slots=16, kv_tokens=AMPLE)
    assert play(Job(stock, PrefixTree.of(trace).paths)) == arms["lru"] != arms["gds"]


def test_little_kv_rejects_what_cannot_fit_and_serves_the_rest():
    """60 blocks of KV: no prompt of more is served; the others are."""
    trace = Workload(kind="agent", sessions=8, turns=20).trace(0)
    arm = Arm(name="s", engine="sglang", policy="gds", slots=64, kv_tokens=60 * 512)
    played = play(Job(arm, PrefixTree.of(trace).paths))
    for served in played.served:
        assert served.rejected == (served.prompt_tokens > 60 * 512)


def test_more_kv_than_there_are_blocks_changes_nothing():
    """Of ample KV only as much is built as could ever be used."""
    prompts = PrefixTree.of(Workload(kind="agent", sessions=8, turns=10).trace(0)).paths
    arm = Arm(name="s", engine="sglang", policy="stock", slots=16, kv_tokens=AMPLE)
    layer = CacheLayer(16, AMPLE // 512)
    served = [serve(layer, prompt, admitted_blocks(len(prompt), "dense", 16)) for prompt in prompts]
    played = play(Job(arm, prompts))
    assert played.served == [found for found, _kept in served]
    assert played.evicted_states == layer.evicted_states > 0


def test_in_processes_of_their_own_numbers_repeat(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "standins"))
    sizes = {"engine": "sglang", "policy": "gds", "slots": 16, "kv_tokens": AMPLE}
    arms = [Arm(name=name, python=python, **sizes) for name, python in PYTHONS.items()]
    cell = Cell(name="c", workload=Workload(kind="agent", sessions=4, turns=5), arms=arms)
    with Bench(Trial(name="t", cells=[cell], repeats=2)) as bench:
        played = {(run.arm, run.seed): played for run, played in bench.runs()}
        assert bench.versions == {"sglang": engine_version()}
    assert played["a", 0] == played["b", 0] != played["a", 1] == played["b", 1]
    assert played["a", 0].served
