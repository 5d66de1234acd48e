"""SGLang's hierarchical cache (HiCache): states that move to the host and back.

The gain of a state of depth b below one of depth a is d*(b - a) + e*(b*b - a*a)/2e5 with
d = 1.862e-5 and e = 3.33e-6; the expected values below are worked out by hand.
"""

import pytest
from brute_force import WatchedHostTraffic
from cache_layer import CORES, MAMBA, plugin
from host_layer import WRITE_POLICIES, HostTraffic
from random_traffic import host_operations, perform
from scheduled import request
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams

both_cores = pytest.mark.parametrize("core", CORES)
both_ways = pytest.mark.parametrize("write", WRITE_POLICIES)

GAIN = {
    (0, 10): 1.862e-4 + 1.665e-9,
    (0, 20): 3.724e-4 + 6.66e-9,
    (0, 40): 7.448e-4 + 2.664e-8,
    (0, 50): 9.31e-4 + 4.1625e-8,
    (0, 60): 1.1172e-3 + 5.994e-8,
    (30, 60): 5.586e-4 + 4.4955e-8,
    (0, 100): 1.862e-3 + 1.665e-7,
    (100, 120): 3.724e-4 + 7.326e-8,
    (0, 120): 2.2344e-3 + 2.3976e-7,
}


def tokens(first: int, count: int) -> list[int]:
    return [first * 1_000 + i for i in range(count)]


def built(core: str, write: str, **options) -> HostTraffic:
    with plugin(policy="gds"):
        return HostTraffic(core, write, **options)


def cached(traffic: HostTraffic, *requests: list[int]) -> list[int]:
    """Run the requests, have their copies made, and return the nodes of their states."""
    for tokens in requests:
        traffic.run(tokens)
        traffic.events()
    return [traffic.match(tokens).best_match_node for tokens in requests]


def registry(traffic: HostTraffic):
    return traffic.core.scheduler_side.registry


def priority(traffic: HostTraffic, node: int):
    return pytest.approx(registry(traffic).priority(node), rel=1e-12)


A, B, C = tokens(1, 100), tokens(1, 120), tokens(2, 50)


def with_a_on_the_host(core: str, write: str) -> tuple[HostTraffic, list[int]]:
    """A of depth 100 on the host alone; B of depth 120 below it and C of depth 50 on the device."""
    traffic = built(core, write)
    nodes = cached(traffic, A, B, C)
    traffic.hold(B)
    traffic.hold(C)
    assert traffic.evict(states=1) == 1
    assert registry(traffic).host_only() == {nodes[0]}
    traffic.let_go()
    traffic.let_go()
    traffic.check()
    return traffic, nodes


@both_cores
@both_ways
def test_a_state_on_the_host_alone_is_a_shallower_neighbour(core, write):
    """A went with priority 1.8621665e-3, the watermark since. B costs the 20 tokens below A."""
    traffic, (a, b, c) = with_a_on_the_host(core, write)
    clock = GAIN[0, 100]
    assert pytest.approx(registry(traffic).watermark, rel=1e-12) == clock
    assert priority(traffic, b) == clock + GAIN[100, 120]
    assert priority(traffic, c) == clock + GAIN[0, 50]
    assert traffic.evict(states=1) == 1
    assert registry(traffic).host_only() == {a, b}
    assert traffic.hit(C) == (50, 0, 0)
    traffic.check()


@both_cores
@both_ways
def test_a_state_that_leaves_the_host_raises_the_gain_below_it(core, write):
    """As before, but A leaves the host as well: now B costs 120 tokens, and C goes first."""
    traffic, (a, b, c) = with_a_on_the_host(core, write)
    assert traffic.evict_host(states=1) == 1
    assert a not in registry(traffic)
    clock = GAIN[0, 100]
    assert priority(traffic, b) == clock + GAIN[0, 120]
    assert traffic.evict(states=1) == 1
    assert registry(traffic).host_only() == {c}
    assert traffic.hit(B) == (120, 0, 0)
    traffic.check()


@both_cores
@both_ways
def test_a_load_from_the_host_is_a_use_and_brings_the_same_bytes(core, write):
    """X of depth 20, then Y of depth 40 leave; the watermark is Y's priority when X comes back."""
    traffic = built(core, write)
    x, y = tokens(1, 20), tokens(2, 40)
    states = traffic.requests.mamba_pool.mamba_cache
    traffic.run(x)
    (slot,) = traffic.state_slots()
    states.temporal[:, slot] = 7
    states.conv[0][:, slot] = 3
    node, _ = cached(traffic, x, y)
    assert traffic.evict(states=1) == 1
    assert registry(traffic).host_only() == {node}
    assert traffic.evict(states=1) == 1
    states.temporal.zero_()
    states.conv[0].zero_()
    assert traffic.hit(x) == (0, 20, 1)

    traffic.hold(x)
    assert traffic.hit(x) == (20, 0, 0)
    assert node not in registry(traffic).host_only()
    (slot,) = traffic.state_slots()
    assert bool((states.temporal[:, slot] == 7).all())
    assert bool((states.conv[0][:, slot] == 3).all())
    traffic.let_go()
    traffic.events()
    assert pytest.approx(registry(traffic).watermark, rel=1e-12) == GAIN[0, 40]
    assert priority(traffic, node) == GAIN[0, 40] + GAIN[0, 20]
    traffic.check()


@both_cores
@both_ways
def test_a_split_leaves_the_host_copy_on_the_child(core, write):
    """60 tokens on the host are split at 30, where a new state is then its neighbour."""
    traffic = built(core, write)
    whole, half = tokens(1, 60), tokens(1, 30)
    (node,) = cached(traffic, whole)
    traffic.evict(states=1)
    assert traffic.hit(half) == (0, 0, 0)
    assert registry(traffic).host_only() == {node}
    traffic.check()
    traffic.run(half)
    traffic.events()
    assert traffic.hit(whole) == (30, 30, 1)
    traffic.hold(whole)
    assert traffic.hit(whole) == (60, 0, 0)
    traffic.let_go()
    traffic.events()
    assert priority(traffic, node) == GAIN[0, 60] + GAIN[30, 60]
    traffic.check()


@both_cores
def test_a_copy_to_the_host_is_no_use(core):
    """X of depth 20 is still being copied when Z of depth 10 goes and the watermark rises."""
    traffic = built(core, "write_through")
    z, x = tokens(1, 10), tokens(2, 20)
    cached(traffic, z)
    traffic.run(x)
    node = traffic.match(x).best_match_node
    assert traffic.evict(states=2) == 1
    assert pytest.approx(registry(traffic).watermark, rel=1e-12) == GAIN[0, 10]
    assert priority(traffic, node) == GAIN[0, 20]
    traffic.events()
    assert priority(traffic, node) == GAIN[0, 20]
    assert traffic.evict(states=1) == 1


@both_cores
def test_the_last_request_counts_although_a_copy_is_under_way(core):
    """As before, with a request that lets go of X after the watermark has risen."""
    traffic = built(core, "write_through")
    z, x = tokens(1, 10), tokens(2, 20)
    cached(traffic, z)
    traffic.run(x)
    traffic.hold(x)
    node = traffic.match(x).best_match_node
    assert traffic.evict(states=2) == 1
    assert priority(traffic, node) == GAIN[0, 20]
    traffic.let_go()
    assert priority(traffic, node) == GAIN[0, 10] + GAIN[0, 20]
    traffic.events()
    assert priority(traffic, node) == GAIN[0, 10] + GAIN[0, 20]


@both_cores
@both_ways
def test_a_flush_forgets_the_host_too(core, write):
    traffic, _ = with_a_on_the_host(core, write)
    traffic.flush()
    assert len(registry(traffic)) == 0
    assert not registry(traffic).host_only()
    assert traffic.hit(A) == (0, 0, 0)
    cached(traffic, A, C)
    traffic.check()


# A state on the host and no room for it.


def asking(traffic: HostTraffic, asked: list[int]):
    """A request matched as the scheduler does it, and what it asks to be loaded."""
    made = request([*asked, 999])
    made.init_next_round_input(traffic.cache)
    made.kv.mamba_needs_clear = False
    return made, InitLoadBackParams(
        best_match_node=made.best_match_node, host_hit_length=made.host_hit_length, req=made
    )


@both_cores
def test_a_request_waits_when_a_state_can_get_no_slots(core):
    """Two slots, both pinned: nothing is loaded and nothing asserted. One let go is not enough."""
    with plugin(policy="gds"):
        traffic = HostTraffic(core, "write_through", slots=2)
        x = tokens(1, 20)
        cached(traffic, x)
        traffic.evict(states=1)
        for first in (2, 3):
            cached(traffic, tokens(first, 10))
            traffic.hold(tokens(first, 10))
        made, load = asking(traffic, x)
        for held in (2, 1):
            assert traffic.cache.init_load_back(load) is None
            assert not made.kv.holds_mamba
            assert len(traffic.held) == held
            traffic.let_go()
            traffic.check()
        assert traffic.cache.init_load_back(load)[0] == 20
        assert made.kv.holds_mamba


def with_a_load_that_fails(traffic: HostTraffic):
    """10 tokens with a state on the device, 60 more on the host, and no KV to load them into."""
    short, whole = tokens(1, 10), tokens(1, 70)
    cached(traffic, short, whole)
    traffic.hold(short)
    traffic.evict(kv_tokens=60)
    other = traffic.allocator.alloc(traffic.allocator.available_size() - 5)
    assert other is not None
    made, load = asking(traffic, whole)
    assert (made.prefix_len, made.host_hit_length, made.mamba_host_hit_length) == (10, 60, 1)
    loaded = traffic.cache.init_load_back(load)
    assert loaded == (0, made.last_node)
    return made


@both_cores
def test_a_load_that_fails_leaves_the_request_the_state_of_the_device(core):
    with plugin(policy="gds"):
        traffic = HostTraffic(core, "write_through", kv_tokens=200)
        made = with_a_load_that_fails(traffic)
    state = traffic.core.get_component_device_value(made.last_node, MAMBA)
    assert made.kv.mamba_cow_src_index.tolist() == state.tolist()
    assert made.kv.holds_mamba
    assert not made.kv.mamba_needs_clear


@both_cores
def test_sglang_alone_goes_on_with_ten_tokens_and_no_state(core):
    made = with_a_load_that_fails(HostTraffic(core, "write_through", kv_tokens=200))
    assert made.prefix_len == 10
    assert made.kv.mamba_cow_src_index is None
    assert not made.kv.holds_mamba


# Random operations. A small host is under pressure itself; a small device has much on the host.

SEED = 20_241_129
OPERATIONS = 2_000
SIZES = {
    "small host": {"slots": 16, "kv_tokens": 900, "ratio": 0.4},
    "small device": {"slots": 32, "kv_tokens": 600, "ratio": 2.0},
    "hardly any host": {"slots": 16, "kv_tokens": 900, "ratio": 0.05},
}
all_sizes = pytest.mark.parametrize("size", SIZES)


def run_in_step(caches: list[HostTraffic], count: int) -> int:
    """Run all caches through the same operations; return how many states were host-only."""
    on_host = 0
    for number, operation in enumerate(host_operations(SEED, count)):
        seen = []
        for cache in caches:
            result = perform(cache, operation)
            cache.check()
            seen.append((result, cache.state_slots(), cache.sizes()))
        assert all(result == seen[0] for result in seen), (number, operation, seen)
        on_host += len(registry(caches[-1]).host_only())
    return on_host


@both_ways
@all_sizes
def test_gds_is_the_same_on_both_cores_and_equals_brute_force(write, size, share):
    count = int(OPERATIONS * share)
    with plugin(policy="gds"):
        watched = WatchedHostTraffic("python", write, **SIZES[size])
        other = HostTraffic("rust", write, **SIZES[size])
        on_host = run_in_step([watched, other], count)
    assert registry(watched).watermark == registry(other).watermark
    assert watched.evictions > count // 4
    if size == "small device":
        assert on_host > count
        assert watched.loads > count // 20


@both_ways
@all_sizes
def test_lru_through_the_plugin_is_sglang_without_it(write, size, share):
    plain = [HostTraffic(core, write, **SIZES[size]) for core in CORES]
    with plugin(policy="lru"):
        led = [HostTraffic(core, write, **SIZES[size]) for core in CORES]
    run_in_step(plain + led, int(OPERATIONS * share) // 2)
