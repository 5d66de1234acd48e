"""The arm key `states_per_path`: --mamba-max-states-per-path on SGLang's real cache layer.

After each insert SGLang drops the shallowest states above the limit, but for the new one, forks,
and states that a running request holds: it goes on from the state that it cached last, so a session
keeps two even with a limit of 1.
"""

import pytest
from cache_layer import CORES, plugin

from statecache.ab.arms import Arm, policies_of
from statecache.ab.drivers.cache_layer_protocol import Job
from statecache.ab.workloads import Workload
from statecache.replay.prefix_tree import PrefixTree
from statecache_sglang.bench.cache_driver import play, serve
from statecache_sglang.bench.cache_layer import CacheLayer

SLOTS = 16
POOLS = ("native", "int8")
POLICIES = policies_of("sglang", "native")


def layer_of(core: str, policy: str, pool: str, states_per_path: int) -> CacheLayer:
    given = {} if policy == "stock" else {"policy": policy}
    if given and pool == "int8":
        given |= {"checkpoints": "int8", "checkpoint_slots": SLOTS}
    with plugin(**given):
        return CacheLayer(
            SLOTS,
            1_000,
            core,
            states_per_path=states_per_path,
            own_int8_slots=SLOTS if policy == "stock" and pool == "int8" else 0,
        )


def depths_of(layer: CacheLayer, prompt: list[int]) -> list[int]:
    """Where states are on the path of the prompt."""
    found = {layer.match(prompt[:depth])[1] for depth in range(1, len(prompt) + 1)}
    return sorted(found - {0})


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("policy", POLICIES)
def test_at_most_so_many_states_stay_on_a_path(policy: str, pool: str, core: str) -> None:
    """States at 2, 4, ... 10 of a prompt, then one at 12 of its next turn.

    With a limit of 3 the state at 8 takes the place of that at 2 (2, 4, 6 and 8 are one too many),
    10 that of 4, and 12 that of 6. With 2 and with 1 each takes that of the one but the last: the
    last is held by the request that computes the next.
    """
    prompt = list(range(1, 13))
    for limit, first, then in (
        (0, [2, 4, 6, 8, 10], [2, 4, 6, 8, 10, 12]),
        (3, [6, 8, 10], [8, 10, 12]),
        (2, [8, 10], [10, 12]),
        (1, [8, 10], [10, 12]),
    ):
        layer = layer_of(core, policy, pool, limit)
        serve(layer, prompt[:10], [2, 4, 6, 8, 10])
        assert depths_of(layer, prompt[:10]) == first
        serve(layer, prompt, [12])
        assert depths_of(layer, prompt) == then
        assert layer.evicted_states == 6 - len(then)  # those above the limit count


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_fork_stays_above_the_limit(policy: str, core: str) -> None:
    """Two prompts part at 4, a limit of 2; the second goes on to 6, 8 and 10.

    At 8 there are 4, 6 and 8: 4 is a fork and 6 is held, so all three stay. At 10 the state at 6
    goes: it is held no more, and neither a fork nor the end.
    """
    layer = layer_of(core, policy, "native", 2)
    serve(layer, [1, 2, 3, 4, 5, 6], [2, 4, 6])
    other = [1, 2, 3, 4, 7, 8, 9, 10, 11, 12]
    for end, kept in ((6, [4, 6]), (8, [4, 6, 8]), (10, [4, 8, 10])):
        serve(layer, other[:end], [end])
        assert depths_of(layer, other[:end]) == kept


@pytest.mark.parametrize("states_per_path", [0, 1, 3])
@pytest.mark.parametrize("pool", POOLS)
def test_sglang_alone_is_lru_of_the_plugin(pool: str, states_per_path: int) -> None:
    """In the int8 pool, too, which is then SGLang's own, of as many slots."""
    prompts = PrefixTree.of(Workload(kind="agent", sessions=8, turns=10).trace(0)).paths
    alone, led = (
        play(
            Job(
                Arm(
                    name="a",
                    engine="sglang",
                    policy=policy,
                    pool=pool,
                    slots=16,
                    int8_ratio=1.5,
                    kv_tokens=2**24,
                    states_per_path=states_per_path,
                ),
                prompts,
            )
        )
        for policy in ("stock", "lru")
    )
    assert alone == led
    assert alone.evicted_states > 0


@pytest.mark.parametrize("policy", ["stock", "gds"])
def test_an_int8_pool_has_the_slots_of_its_arm(policy: str) -> None:
    """16 native slots are 24 at 1.5 a native one: 24 states are all kept, of 25 one goes."""
    arm = Arm(
        name="a",
        engine="sglang",
        policy=policy,
        pool="int8",
        slots=16,
        int8_ratio=1.5,
        kv_tokens=2**24,
        admission="ends",
    )
    for count, evicted in ((24, 0), (25, 1)):
        prompts = [[2 * n, 2 * n + 1] for n in range(count)]
        assert play(Job(arm, prompts)).evicted_states == evicted
