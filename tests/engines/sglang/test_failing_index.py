"""The state index fails in the middle of its work: SGLang's own order takes over, no slot is lost.

The index does not fail by itself; here one of its calls raises, before or after it
did its work.
"""

import logging

import pytest
from cache_layer import CORES, Traffic, plugin
from host_layer import WRITE_POLICIES, HostTraffic
from planted_faults import FailingIndex
from random_traffic import host_operations, operations, perform

from statecache.index.policies import make_index
from statecache_sglang import state_registry

SEED = 20_241_201
SIZES = {"slots": 16, "kv_tokens": 900}
CALLS = ("insert", "touch", "begin_walk", "next_victim", "evicted", "end_walk")
both_cores = pytest.mark.parametrize("core", CORES)


@pytest.fixture(params=CALLS)
def failing(request, monkeypatch, caplog):
    """Each call in turn, on every index made from here on."""
    caplog.set_level(logging.CRITICAL, "statecache.sglang")

    def plant(late: bool) -> None:
        monkeypatch.setattr(
            state_registry,
            "make_index",
            lambda *of: FailingIndex(make_index(*of), request.param, late=late),
        )

    return plant


def no_slot_is_lost(traffic: Traffic) -> None:
    traffic.sane()
    cached = traffic.core.all_mamba_values_flatten().numel()
    assert cached + traffic.state_pool.available_size() == traffic.slots
    kv = traffic.core.all_values_flatten().numel()
    assert kv + traffic.allocator.available_size() == traffic.kv_tokens


def ended(traffic: Traffic) -> bool:
    """Whether the plugin's part ended by one error, not more."""
    side = traffic.core.scheduler_side
    return (side.faults.active, side.faults.anomalies) == (False, 1)


@both_cores
@pytest.mark.parametrize("late", [False, True])
def test_with_lru_nothing_changes_at_all(failing, core, late):
    failing(late)
    with plugin(policy="lru"):
        led = Traffic(core, **SIZES)
    alone = Traffic(core, **SIZES)
    for operation in operations(SEED, 150):
        assert perform(led, operation) == perform(alone, operation)
        assert led.state_slots() == alone.state_slots()
        no_slot_is_lost(led)
    assert ended(led)


@both_cores
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("pool", ["active", "int8"])
def test_with_gds_eviction_goes_on(failing, core, late, pool):
    failing(late)
    int8 = {"int8": True, "int8_slots": SIZES["slots"]} if pool == "int8" else {}
    with plugin(policy="gds", **int8):
        led = Traffic(core, **SIZES)
    for operation in operations(SEED, 150):
        perform(led, operation)
        no_slot_is_lost(led)
    assert ended(led)
    assert led.run([7] * 100) is not None
    assert led.hit([7] * 100) == 100


@both_cores
@pytest.mark.parametrize("write", WRITE_POLICIES)
def test_with_a_host_tier_eviction_goes_on(failing, core, write):
    failing(False)
    with plugin(policy="gds"):
        led = HostTraffic(core, write, ratio=0.4, **SIZES)
        for operation in host_operations(SEED, 150):
            perform(led, operation)
            no_slot_is_lost(led)
    assert ended(led)


@both_cores
def test_a_flush_starts_the_index_again(failing, core):
    failing(False)
    with plugin(policy="gds"):
        led = Traffic(core, **SIZES)
    for operation in operations(SEED, 150):
        perform(led, operation)
    assert ended(led)
    led.flush()
    assert led.core.scheduler_side.faults.active
    led.run([7] * 100)
    assert len(led.core.scheduler_side.registry) == 1


@pytest.mark.parametrize("where", ["a fork", "a path"])
def test_a_state_that_is_gone_unseen_does_not_stop_the_rust_core(where, caplog):
    """The walk is to lock it, and SGLang answers with a `KeyError`: SGLang's own step goes on."""
    caplog.set_level(logging.CRITICAL, "statecache.sglang")
    with plugin(policy="gds"):
        led = Traffic("rust", **SIZES)
    led.run([1] * 10)
    led.run([2])
    led.run([2] * 20)
    if where == "a fork":
        led.run([2] + [3] * 20)
    inner = led.match([2]).best_match_node
    registry, core = led.core.scheduler_side.registry, led.core
    unknown = 1_000_000
    core._native_order = {unknown: None, **core._native_order}
    registry.above = lambda _state: [unknown]
    held = len(led.state_slots())
    assert registry.priority(inner) == min(map(registry.priority, registry.states()))
    assert led.evict(states=1) == 1
    assert len(led.state_slots()) == held - 1
    no_slot_is_lost(led)
    assert ended(led)
    assert led.evict(states=10) == held - 1
    no_slot_is_lost(led)
