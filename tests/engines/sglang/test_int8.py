"""The int8 checkpoint pool on SGLang's real cache layer, both tree cores."""

import pytest
import torch
from cache_layer import CORES, Traffic, plugin
from scheduled import adder, admit, ask, finish, request
from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from test_slot_shortage import fill_with_pinned, pinned, skipped

from statecache.checkpoint import pool as checkpoint_pool
from statecache.checkpoint.pool import ActiveState, SideState
from statecache_sglang import checkpoints, reporting
from support.launch_failures import LAUNCH_ERRORS, failing, launch_error
from support.operators import Operators, count_uploads

STATES = 16


def int8_traffic(core: str, **options) -> Traffic:
    with plugin(policy="gds", int8=True, int8_slots=STATES):
        return Traffic(core, **options)


def state_of(traffic: Traffic, slot: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    cache = traffic.requests.mamba_pool.mamba_cache
    return cache.temporal[:, slot].clone(), [conv[:, slot].clone() for conv in cache.conv]


def fill_state(traffic: Traffic, slot: int, seed: int) -> None:
    cache = traffic.requests.mamba_pool.mamba_cache
    made = torch.Generator().manual_seed(seed)
    for tensor in (cache.temporal, *cache.conv):
        row = torch.randn(tensor[:, slot].shape, generator=made)
        tensor[:, slot] = row.to(tensor.dtype)


def restore(traffic: Traffic, req) -> None:
    """What `ModelRunner` does before the forward pass of a request with a hit."""
    traffic.requests.mamba_ckpt_pool.load_to_active(
        traffic.requests.mamba_pool,
        req.kv.mamba_cow_src_index,
        req.kv.mamba_pool_idx.unsqueeze(0),
    )


@pytest.mark.parametrize("core", CORES)
def test_d_a_state_comes_back_although_its_slot_was_used_by_another_request(core):
    """Convolution rows bit for bit; the recurrent state within one int8 step of bfloat16."""
    traffic = int8_traffic(core, slots=2)
    first = admit(traffic, list(range(30)))
    slot = int(first.kv.mamba_pool_idx)
    fill_state(traffic, slot, seed=1)
    temporal, conv = state_of(traffic, slot)
    finish(traffic, first, 30)
    assert traffic.requests.mamba_allocator.available_size() == 2

    others = [admit(traffic, [900 + n] * 20) for n in range(2)]
    for other in others:
        fill_state(traffic, int(other.kv.mamba_pool_idx), seed=2)
    assert slot in [int(other.kv.mamba_pool_idx) for other in others]
    for other in others:
        finish(traffic, other, 20)

    again = admit(traffic, [*range(30), 7])
    assert again.prefix_len == 30
    restore(traffic, again)
    temporal_now, conv_now = state_of(traffic, int(again.kv.mamba_pool_idx))
    assert all(torch.equal(now, was) for now, was in zip(conv_now, conv, strict=True))
    step = temporal.float().abs().amax(dim=-2, keepdim=True) / 127
    assert ((temporal_now.float() - temporal.float()).abs() <= step).all()


@pytest.mark.parametrize("core", CORES)
def test_both_pools_add_up(core):
    traffic = int8_traffic(core, slots=4)
    pool = traffic.requests.mamba_ckpt_pool
    for number in range(40):
        tokens = [number % 23] * (10 + number % 5)
        finish(traffic, admit(traffic, tokens), len(tokens))
        cached = len(traffic.state_slots())
        assert cached + pool.available_size() == pool.num_slots == STATES
        assert traffic.requests.mamba_allocator.available_size() == 4
        traffic.core.sanity_check([], [])
    assert pool.available_size() == 0
    assert traffic.core.scheduler_side.faults.anomalies == 0


@pytest.mark.parametrize("core", CORES)
def test_b_caching_is_skipped_when_every_checkpoint_is_pinned(core):
    traffic = int8_traffic(core, slots=4)
    pool = traffic.requests.mamba_ckpt_pool
    for number in range(STATES):
        tokens = pinned(number)
        finish(traffic, admit(traffic, tokens), len(tokens))
        traffic.hold(tokens)
    before = traffic.state_slots()
    running = admit(traffic, list(range(30)))
    traffic.cache.checkpoint(running, up_to=30)
    assert skipped(traffic) == 1
    assert traffic.state_slots() == before
    assert pool.available_size() == 0
    traffic.let_go()
    traffic.cache.checkpoint(running, up_to=30)
    assert skipped(traffic) == 1
    assert traffic.hit(list(range(40))) == 30
    assert len(traffic.state_slots()) + pool.available_size() == STATES


@pytest.mark.parametrize("core", CORES)
def test_a_checkpoint_slot_is_given_back_when_no_active_slot_can_be_had(core):
    """With track buffers a running request needs both. Three slots for itself, none left."""
    traffic = int8_traffic(core, slots=3, extra_buffer=True)
    running = admit(traffic, list(range(30)))
    running.kv.mamba_last_track_seqlen = 30
    assert traffic.requests.mamba_allocator.available_size() == 0
    traffic.cache.checkpoint(running, up_to=30)
    assert skipped(traffic) == 1
    assert traffic.state_slots() == []
    assert traffic.requests.mamba_ckpt_pool.available_size() == STATES


@pytest.mark.parametrize("core", CORES)
def test_a_finished_request_without_a_checkpoint_slot_leaks_nothing(core):
    traffic = int8_traffic(core, slots=4)
    for number in range(STATES):
        tokens = pinned(number)
        finish(traffic, admit(traffic, tokens), len(tokens))
        traffic.hold(tokens)
    finish(traffic, admit(traffic, [5] * 20), 20)
    assert skipped(traffic) == 1
    assert traffic.requests.mamba_allocator.available_size() == 4
    assert traffic.requests.mamba_ckpt_pool.available_size() == 0


@pytest.mark.parametrize("core", CORES)
def test_a_state_that_is_not_finite_is_never_cached(core):
    traffic = int8_traffic(core, slots=4)
    pool = traffic.requests.mamba_ckpt_pool
    broken = admit(traffic, list(range(30)))
    temporal = traffic.requests.mamba_pool.mamba_cache.temporal
    temporal[0, int(broken.kv.mamba_pool_idx), 0, 0, 0] = float("nan")
    finish(traffic, broken, 30)
    assert traffic.state_slots() == []
    assert pool.available_size() == STATES
    assert pool.refused == 1
    assert traffic.requests.mamba_allocator.available_size() == 4
    assert traffic.hit(list(range(40))) == 0


@pytest.mark.parametrize("core", CORES)
def test_a_shortage_of_active_slots_destroys_no_checkpoint(core):
    with plugin(policy="gds", int8=True, int8_slots=STATES):
        traffic = Traffic(core, slots=4)
        run_out_of_active_slots(traffic)


def run_out_of_active_slots(traffic: Traffic) -> None:
    for number in range(3):
        finish(traffic, admit(traffic, pinned(number)), 10)
    cached = traffic.state_slots()
    running = [admit(traffic, [50 + n] * 20) for n in range(4)]
    waiting = request([5] * 20)
    waiting.init_next_round_input(traffic.cache)
    assert ask(adder(traffic), waiting) is AddReqResult.NO_TOKEN
    traffic.cache.evict_for_alloc(EvictParams(num_tokens=0, mamba_num=1))
    matched = request([*pinned(0), 999])
    matched.init_next_round_input(traffic.cache)
    assert matched.prefix_len == 0
    assert traffic.state_slots() == cached
    finish(traffic, running[0], 20)
    matched.init_next_round_input(traffic.cache)
    assert matched.prefix_len == 10


def test_without_int8_cached_states_make_room_for_requests():
    """The counterpart: there, cached states are what a request may take its slot from."""
    with plugin(policy="gds"):
        traffic = Traffic("rust", slots=4)
        fill_with_pinned(traffic, 4)
        waiting = request([5] * 20)
        waiting.init_next_round_input(traffic.cache)
        assert ask(adder(traffic), waiting) is AddReqResult.NO_TOKEN
        traffic.let_go()
        assert ask(adder(traffic), waiting) is not AddReqResult.NO_TOKEN


@pytest.mark.parametrize("layers", [12, 23, 36])
@pytest.mark.parametrize("side", [False, True])
def test_a_copy_is_one_launch_a_kind_whatever_the_layers(layers, side, monkeypatch):
    """One upload a store, of its slots and cleared flags; a load has all on the device already."""
    more = {
        "short_conv": SideState(torch.zeros(layers, 6, 5)),
        "ngram": SideState(torch.zeros(6, 2), 0),
    }
    conv = [torch.zeros(layers, 6, 4, 3)]
    active = ActiveState(torch.zeros(layers, 6, 2, 8, 8), conv, more if side else {})
    monkeypatch.setattr(checkpoints, "_active_state", lambda _: active)
    monkeypatch.setattr(checkpoints.state_slots, "device_of", lambda _: "cpu")
    pool = checkpoints.CheckpointSlots(None, 4)
    uploads = count_uploads(monkeypatch)
    slots, running = pool.alloc(2), torch.tensor([3, 5])
    for _ in range(2):
        with Operators() as operators:
            pool.store_from_active(None, running, slots)
        assert operators.seen == ["move", "store"]
        with Operators() as operators:
            pool.load_to_active(None, slots, running)
        assert operators.seen == ["move", "load"]
    assert uploads == [(1, 2)] * 2
    assert (pool.stored, pool.failed, pool.anomalies) == (4, 0, 0)


def asked_twice(traffic: Traffic, tokens: list[int]) -> None:
    """A prompt whose state is cached, and one that goes on from it and gets that state back."""
    first = admit(traffic, tokens)
    fill_state(traffic, int(first.kv.mamba_pool_idx), seed=tokens[0])
    conv = state_of(traffic, int(first.kv.mamba_pool_idx))[1]
    finish(traffic, first, len(tokens))
    again = admit(traffic, [*tokens, 99])
    assert again.prefix_len == len(tokens)
    restore(traffic, again)
    back = state_of(traffic, int(again.kv.mamba_pool_idx))[1]
    assert all(torch.equal(*pair) for pair in zip(conv, back, strict=True))
    finish(traffic, again, len(tokens) + 1)


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("reason", LAUNCH_ERRORS)
@pytest.mark.parametrize("kernel", ["move", "store", "load"])
def test_a_kernel_that_cannot_be_launched_is_replaced_and_counted(core, reason, kernel, caplog):
    """From its third launch on: every state is cached and comes back, one line, one anomaly."""
    traffic = int8_traffic(core, slots=4)
    pool = traffic.requests.mamba_ckpt_pool
    pool._pool._launches.ops = failing(launch_error(reason), kernel, after=2)
    for number in range(5):
        asked_twice(traffic, [number] * 10)
    assert (pool.failed, pool.stored, pool.restored) == (0, 10, 5)
    assert reporting.sample(traffic.cache)["anomalies"] == 1
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert reason in line
    assert "\n" not in line


@pytest.mark.parametrize("reason", LAUNCH_ERRORS)
@pytest.mark.parametrize("kernel", ["move", "store", "load"])
def test_kernels_that_cannot_be_launched_at_the_start_are_not_used(
    reason, kernel, monkeypatch, caplog
):
    """One line when the pool is made; then all is as without them, and no anomaly."""
    broken = failing(launch_error(reason), kernel)
    monkeypatch.setattr(checkpoint_pool, "ops_for", lambda _: broken)
    traffic = int8_traffic("rust", slots=4)
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert reason in line
    assert "\n" not in line
    asked_twice(traffic, [5] * 10)
    assert reporting.sample(traffic.cache)["anomalies"] == 0
