"""20,000 random operations on SGLang's real cache layer, both tree cores, step by step.

With --quick a tenth of them.

After every operation SGLang's own invariants hold on every cache the plugin leads, and cached +
free = total for states and KV. 16 state slots and 900 KV slots keep both under eviction pressure
throughout.
"""

import pytest
from brute_force import WatchedTraffic
from cache_layer import CORES, LEADS_RUST, Traffic, plugin
from random_traffic import operations, perform

SEED = 20_240_517
OPERATIONS = 20_000
SIZES = {"slots": 16, "kv_tokens": 900}


def run_in_step(caches: list[Traffic], seed: int, count: int) -> None:
    for number, operation in enumerate(operations(seed, count)):
        seen = []
        for cache in caches:
            result = perform(cache, operation)
            if hasattr(cache.core, "scheduler_side"):
                cache.check()
            free = cache.allocator.available_size()
            seen.append((result, cache.state_slots(), free))
        assert all(result == seen[0] for result in seen), (seed, number, operation, seen)


def test_lru_through_the_plugin_is_sglang_without_it(share):
    plain = [Traffic(core, **SIZES) for core in CORES]
    with plugin(policy="lru"):
        led = [Traffic(core, **SIZES) for core in CORES]
    assert [type(cache.core).__name__ for cache in plain + led] == [
        "UnifiedTreeCore",
        "RustUnifiedTreeCore",
        "IndexedPythonCore",
        "IndexedRustCore" if LEADS_RUST else "IndexedPythonCore",
    ]
    run_in_step(plain + led, SEED, int(OPERATIONS * share))


INT8 = {"int8": True, "int8_slots": SIZES["slots"]}


@pytest.mark.parametrize("pool", ["active", "int8"])
def test_gds_is_the_same_on_both_cores_and_equals_brute_force(pool, share):
    with plugin(policy="gds", **(INT8 if pool == "int8" else {})):
        watched = WatchedTraffic("python", **SIZES)
        other = Traffic("rust", **SIZES)
    run_in_step([watched, other], SEED + 1, int(OPERATIONS * share))
    assert (
        watched.core.scheduler_side.registry.watermark
        == other.core.scheduler_side.registry.watermark
    )
    assert watched.evictions > 5_000 * share


@pytest.mark.parametrize("pool", ["active", "int8"])
def test_learned_is_the_same_on_both_cores(pool, share):
    """Every hit, every state that is kept and every victim, with its ghosts and its guard."""
    with plugin(policy="learned", **(INT8 if pool == "int8" else {})):
        caches = [Traffic(core, **SIZES) for core in CORES]
    run_in_step(caches, SEED + 3, int(6_000 * share))
    python, rust = (cache.core.scheduler_side for cache in caches)
    assert python.registry.sample() == rust.registry.sample()
    assert python.registry.sample()["learned_ghosts"] > 100 * share
    assert python.counts.numbers == rust.counts.numbers
    assert python.counts.numbers["evictions|policy"] > 1_000 * share


@pytest.mark.parametrize("policy", ["gds", "lru", "learned", "gds-tips"])
def test_a_cap_on_the_states_of_a_path(policy, share):
    """--mamba-max-states-per-path takes states past the walk: the index must see that."""
    with plugin(policy=policy):
        caches = [Traffic(core, states_per_path=2, **SIZES) for core in CORES]
    if policy == "lru":
        caches += [Traffic(core, states_per_path=2, **SIZES) for core in CORES]
    run_in_step(caches, SEED + 2, int(3_000 * share))
