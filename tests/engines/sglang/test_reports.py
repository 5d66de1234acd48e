"""Situations from public reports about hybrid models, on the real cache layer."""

import random

import pytest
from cache_layer import CORES, Traffic, plugin
from scheduled import admit, finish, request

CHAIN_TOKENS, EVERY = 32_768, 2_048


def chain(number: int) -> list[int]:
    return list(range(number * 1_000_000, number * 1_000_000 + CHAIN_TOKENS))


def three_chains_and_a_fork(traffic: Traffic) -> list[int]:
    """(a) 48 slots of which 36 usable; returns the hits of the fork and the three resends.

    SGLang alone: 0, 8192, 0, 0. With gds: 8192, 32768, 32768, 32768.
    """
    for taken in range(12):
        traffic.run([9_000_000 + taken])
        traffic.hold([9_000_000 + taken])
    chains = [chain(number) for number in range(3)]
    for tokens in chains:
        for end in range(EVERY, CHAIN_TOKENS + 1, EVERY):
            traffic.run(tokens[:end])
    fork = chains[0][:8_192] + list(range(8_000_000, 8_000_000 + 8_192))
    hits = []
    for tokens in (fork, *chains):
        hits.append(traffic.hit(tokens))
        ends = range(hits[-1] + EVERY, len(tokens) + 1, EVERY)
        for end in ends:
            traffic.run(tokens[:end])
    traffic.check()
    return hits


@pytest.mark.parametrize("core", CORES)
def test_a_fork_and_resends_of_long_chains(core):
    with plugin(policy="gds"):
        gds = Traffic(core, slots=48, kv_tokens=150_000)
    fork, *resends = three_chains_and_a_fork(gds)
    assert fork == 8_192
    assert min(resends) > 0
    assert fork + sum(resends) >= 61_440


@pytest.mark.parametrize("core", CORES)
def test_a_the_same_traffic_without_the_plugin_loses_almost_everything(core):
    hits = three_chains_and_a_fork(Traffic(core, slots=48, kv_tokens=150_000))
    assert hits == [0, 8_192, 0, 0]


@pytest.mark.parametrize("core", CORES)
def test_e_a_split_node_has_no_state_of_its_own(core):
    """[A, B, C] is cached, then [A, B, D]: a match of [A, B, X] must not end at [A, B]."""
    a, b, c, d = (list(range(n * 100, n * 100 + 50)) for n in range(4))
    with plugin(policy="gds"):
        traffic = Traffic(core)
    traffic.run(a)
    traffic.run(a + b + c)
    traffic.run(a + b + d)
    assert traffic.hit(a + b + [999]) == len(a)
    assert traffic.run(a + b) == len(a)
    assert traffic.run(a + b) == len(a + b)
    assert traffic.hit(a + b + [999]) == len(a + b)
    assert traffic.hit(a + b + c) == len(a + b + c)
    traffic.check()


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("space", [{"extra_key": "lora-a"}, {"cache_salt": "salt"}])
def test_other_salt_or_extra_key_never_shares_a_state(core, space):
    with plugin(policy="gds"):
        traffic = Traffic(core)
    tokens = list(range(40))
    traffic.run(tokens, **space)
    assert traffic.hit(tokens) == 0
    traffic.run(tokens)
    assert traffic.hit(tokens, **space) == len(tokens)
    assert traffic.hit(tokens) == len(tokens)
    assert len(traffic.state_slots()) == 2


@pytest.mark.parametrize("core", CORES)
def test_a_request_with_an_adapter_never_takes_the_state_of_one_without(core):
    with plugin(policy="gds"):
        traffic = Traffic(core)
    tokens = list(range(40))
    finish(traffic, admit(traffic, tokens), len(tokens))
    prefixes = {}
    for name in (None, "a"):
        again = request([*tokens, 99], lora_id=name)
        again.init_next_round_input(traffic.cache)
        prefixes[name] = again.prefix_len
    assert prefixes == {None: 40, "a": 0}


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize(("cost", "goes"), [("1,0", "long"), ("0,1", "short")])
def test_the_cost_that_was_given_decides(core, cost, goes):
    """10 tokens from nothing, or 5 more after 95: 10 and 5 by length, 100 and 975 by its square."""
    with plugin(policy="gds", cost=cost):
        traffic = Traffic(core)
    asked = {"short": [7] * 10, "long": list(range(100))}
    traffic.run(asked["long"][:95])
    traffic.hold(asked["long"][:95])
    for tokens in asked.values():
        traffic.run(tokens)
    assert traffic.evict(states=1) == 1
    kept = {name for name, tokens in asked.items() if traffic.hit(tokens) == len(tokens)}
    assert kept == asked.keys() - {goes}


@pytest.mark.parametrize("core", CORES)
def test_gds_is_deterministic(core):
    """The same traffic twice leaves the same states in the same slots."""

    def once() -> list[int]:
        rng = random.Random(5)
        with plugin(policy="gds"):
            traffic = Traffic(core, slots=12, kv_tokens=600)
        for _ in range(300):
            tokens = [rng.randrange(3) for _ in range(rng.randint(1, 40))]
            traffic.run(tokens)
        return traffic.state_slots()

    assert once() == once()
