"""What broken state caches elsewhere got wrong, on SGLang's real cache layer.

A warm answer equals a cold one in test_server.py; a state set where its node ends, with the right
depth, in test_differential.py (priorities worked out from the tree alone); speculative decoding is
refused in test_seams.py; an unpin too many raises in the index (tests/unit/test_index_rules.py).
"""

import pytest
from cache_layer import CORES, MAMBA, Traffic, plugin
from random_traffic import operations, perform
from scheduled import admit, request
from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.mem_cache.common import release_kv_cache
from test_shortage import adder, ask, free_slots

SIZES = {"slots": 16, "kv_tokens": 900}
POOLS = {"active": {}, "int8": {"int8": True, "int8_slots": 16}}
both_cores = pytest.mark.parametrize("core", CORES)
both_pools = pytest.mark.parametrize("pool", POOLS)


class Checked(Traffic):
    """Every match ends where a state is, and no deeper than the KV on the way to it."""

    hits = 0

    def match(self, tokens, **namespace):
        found = super().match(tokens, **namespace)
        depth, node = found.device_prefix_len, found.best_match_node
        assert depth <= len(tokens)
        assert len(self.cache.path_device_indices(node)) == depth
        if depth:
            self.hits += 1
            state = self.core.get_component_device_value(node, MAMBA)
            assert state is not None
            assert int(state) in self.state_slots()
        return found


@both_cores
@both_pools
def test_a_hit_is_never_deeper_than_its_kv_or_its_state(core, pool):
    with plugin(policy="gds", **POOLS[pool]):
        traffic = Checked(core, **SIZES)
    for operation in operations(5, 250):
        perform(traffic, operation)
    assert traffic.hits > 20
    traffic.check()


@both_cores
@both_pools
@pytest.mark.parametrize("chunk", [0, 12])
def test_an_aborted_chunked_prefill_gives_everything_back(core, pool, chunk):
    """30 tokens, none or 12 of them cached by a chunk that was through; then SGLang's release."""
    with plugin(policy="gds", **POOLS[pool]):
        traffic = Traffic(core, **SIZES)
    traffic.run([1] * 5)
    kv, active = traffic.allocator.available_size(), free_slots(traffic)
    req = admit(traffic, [1] * 5 + [2] * 25)
    req.kv.kv_committed_len = req.kv.kv_allocated_len = 30
    if chunk:
        traffic.cache.checkpoint(req, up_to=chunk)
    release_kv_cache(req, traffic.cache, checkpoint=False)
    kept = max(chunk - 5, 0)
    assert traffic.allocator.available_size() == kv - kept
    in_tree = 1 if chunk and pool == "active" else 0
    assert free_slots(traffic) == active - in_tree
    assert traffic.cache.mamba_protected_size() == 0
    traffic.check()
    assert traffic.hit([1] * 5 + [2] * 25) == max(chunk, 5)


@both_cores
def test_free_cached_and_pinned_are_the_pool_after_every_admission_that_failed(core):
    """From no state to all of them pinned: what is refused takes nothing, and nothing is lost."""
    with plugin(policy="gds"):
        traffic = Traffic(core, slots=16, extra_buffer=True)
        refused = 0
        for held in range(17):
            waiting = request([5_000 + held] * 20)
            waiting.init_next_round_input(traffic.cache)
            before = (free_slots(traffic), traffic.state_slots())
            if ask(adder(traffic), waiting) is AddReqResult.NO_TOKEN:
                refused += 1
                assert (free_slots(traffic), traffic.state_slots()) == before
                assert not waiting.kv.holds_mamba
            pinned = traffic.cache.mamba_protected_size()
            unpinned = traffic.cache.mamba_evictable_size()
            assert free_slots(traffic) + pinned + unpinned == 16
            assert pinned == held == len(traffic.held)
            traffic.check()
            if held < 16:
                tokens = [1_000 * (held + 1) + i for i in range(10)]
                traffic.run(tokens)
                traffic.hold(tokens)
        assert refused == 3  # a request needs three slots: 2, 1 and 0 are left
