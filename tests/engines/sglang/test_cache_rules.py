"""What broken state caches elsewhere got wrong, on SGLang's real cache layer.

A warm answer equals a cold one in test_server.py; the index knows a state by the depth of its node
in test_differential.py (priorities worked out from the tree alone); the states of speculative
decoding are in test_speculation.py.
"""

import pytest
from cache_layer import CORES, LEADS_RUST, Traffic, plugin
from host_layer import WRITE_POLICIES, HostTraffic
from marks import Marked, has_mark, write_mark
from random_traffic import host_operations, operations, perform
from scheduled import adder, admit, ask, finish, request
from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.mem_cache.common import release_kv_cache
from test_hicache import A, with_a_on_the_host
from test_int8 import restore
from test_slot_shortage import free_slots, pinned

SIZES = {"slots": 16, "kv_tokens": 900}
POOLS = {"active": {}, "int8": {"int8": True, "int8_slots": 16}}
both_cores = pytest.mark.parametrize("core", CORES)
both_pools = pytest.mark.parametrize("pool", POOLS)


@both_cores
@both_pools
def test_a_hit_is_never_deeper_than_its_kv_or_its_state(core, pool):
    with plugin(policy="gds", **POOLS[pool]):
        traffic = Marked(core, **SIZES)
    for operation in operations(5, 600):
        perform(traffic, operation)
    assert traffic.compared > 100
    traffic.check()


class MarkedHost(Marked, HostTraffic):
    """What comes back from the host is compared too, in the tree and for the request itself."""

    own: int | None = None

    def own_copy(self, req, loaded):
        self.own = int(req.kv.mamba_pool_idx) if loaded else None

    def start(self, tokens, **namespace):
        self.own = None
        hit, lock = super().start(tokens, **namespace)
        if self.own is not None:
            assert has_mark(self, self.own, tokens[:hit], namespace)
        return hit, lock


@both_cores
@pytest.mark.parametrize("write", WRITE_POLICIES)
def test_a_state_that_was_on_the_host_comes_back_to_its_own_prefix(core, write):
    with plugin(policy="gds"):
        traffic = MarkedHost(core, write, ratio=2.0, **SIZES)
    for operation in host_operations(5, 600):
        perform(traffic, operation)
    assert traffic.loads > 10
    assert traffic.compared > 100
    traffic.check()


@both_cores
@both_pools
def test_a_request_starts_from_the_state_of_its_own_prefix(core, pool):
    """Real requests, some cached in two pieces: what the model runner copies at their start."""
    with plugin(policy="gds", **POOLS[pool]):
        traffic = Traffic(core, **SIZES)
    started = 0
    for tokens in (op[1][0] for op in operations(6, 300) if op[0] in ("run", "hit", "abort")):
        if not free_slots(traffic):
            traffic.evict(states=1)  # as the admission does
        req = admit(traffic, tokens)
        slot, reused = int(req.kv.mamba_pool_idx), req.prefix_len
        if reused:
            started += 1
            if pool == "int8":
                restore(traffic, req)
                start = slot
            else:
                start = int(req.kv.mamba_cow_src_index)
            assert has_mark(traffic, start, tokens[:reused])
        if len(tokens) - reused > 20:
            write_mark(traffic, slot, tokens[: reused + 10])
            traffic.cache.checkpoint(req, up_to=reused + 10)
        write_mark(traffic, int(req.kv.mamba_pool_idx), tokens)
        finish(traffic, req, len(tokens))
        traffic.check()
    assert started > 50


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


@both_cores
def test_free_cached_and_pinned_are_the_int8_pool_after_every_admission_that_failed(core):
    """Of 16 int8 states none to all are pinned; a request that has one slot finds no two more."""
    with plugin(policy="gds", **POOLS["int8"]):
        traffic = Traffic(core, slots=8, extra_buffer=True)
        checkpoints = traffic.requests.mamba_ckpt_pool
        for number in range(16):
            traffic.run(pinned(number))
        for number in range(2):
            admit(traffic, [100 + number] * 20)
        for held in range(17):
            waiting = request([*pinned(held % 16), 999])
            waiting.init_next_round_input(traffic.cache)
            assert waiting.prefix_len == 10
            assert ask(adder(traffic), waiting) is AddReqResult.NO_TOKEN
            assert free_slots(traffic) == 8 - 2 * 3 - 1
            traffic.requests.mamba_allocator.free(waiting.kv.mamba_pool_idx.unsqueeze(0))
            locked = traffic.cache.mamba_protected_size()
            unlocked = traffic.cache.mamba_evictable_size()
            assert checkpoints.available_size() + locked + unlocked == 16
            assert locked == held == len(traffic.held)
            assert len(traffic.state_slots()) == 16
            if held < 16:
                traffic.hold(pinned(held))
        traffic.sane()


@both_cores
@both_pools
def test_a_lock_released_twice_is_refused_and_nothing_is_below_zero(core, pool):
    """By SGLang itself, as without the plugin; its Rust core answers nothing more after that."""
    with plugin(policy="gds", **POOLS[pool]):
        led = Traffic(core, **SIZES)
    for traffic in (Traffic(core, **SIZES), led):
        traffic.run([1] * 10)
        lock = traffic.start([1] * 10)[1]
        traffic.unlock(lock)
        with pytest.raises((AssertionError, RuntimeError), match="release hit lock_ref=0"):
            traffic.unlock(lock)
    side = led.core.scheduler_side
    assert (side.faults.active, side.faults.anomalies) == (True, 0)
    if core == "rust" and LEADS_RUST:
        assert (dict(led.core._state_locks), dict(led.core._kv_locks)) == ({}, {})
        return
    assert led.cache.mamba_protected_size() == 0
    led.check()
    assert led.evict(states=1) == 1
    led.check()


@both_cores
@both_pools
def test_a_lock_released_after_a_flush_changes_nothing(core, pool):
    with plugin(policy="gds", **POOLS[pool]):
        traffic = Traffic(core, **SIZES)
    traffic.run([1] * 10)
    lock = traffic.start([1] * 10)[1]
    traffic.flush()
    with pytest.raises(KeyError):
        traffic.unlock(lock)
    traffic.run([2] * 10)
    assert (traffic.cache.mamba_protected_size(), traffic.cache.mamba_evictable_size()) == (0, 1)
    assert traffic.evict(states=2) == 1
    traffic.check()


@both_cores
def test_an_unpin_too_many_in_the_index_is_counted_and_sglang_goes_on(core):
    """What lives on the host alone is pinned in the index, once."""
    traffic, (state, *_) = with_a_on_the_host(core, "write_through")
    side = traffic.core.scheduler_side
    side.faults.ask(side.registry._index.unpin, state)
    assert (side.faults.active, side.faults.anomalies) == (True, 0)
    side.faults.ask(side.registry._index.unpin, state)
    assert (side.faults.active, side.faults.anomalies) == (False, 1)
    held = len(traffic.state_slots())
    assert traffic.evict(states=held) == held
    assert traffic.hit(A) == (0, 100, 1)
    traffic.hold(A)
    assert traffic.hit(A) == (100, 0, 0)
    traffic.sane()
    cached = traffic.core.all_mamba_values_flatten().numel()
    assert cached + traffic.state_pool.available_size() == traffic.slots
