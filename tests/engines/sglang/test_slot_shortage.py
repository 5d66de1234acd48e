"""Every state slot in use: the step is skipped, the request goes on or waits, nothing leaks."""

import pytest
from cache_layer import CORES, MAMBA, Traffic, plugin
from scheduled import adder, admit, ask, request
from sglang.srt.managers.schedule_policy import AddReqResult

SLOTS = 16


def pinned(number: int) -> list[int]:
    return [1_000 * (number + 1) + i for i in range(10)]


def fill_with_pinned(traffic: Traffic, states: int) -> None:
    for number in range(states):
        tokens = pinned(number)
        assert traffic.run(tokens) == 0
        traffic.hold(tokens)


def free_slots(traffic: Traffic) -> int:
    return traffic.requests.mamba_allocator.available_size()


def skipped(traffic: Traffic) -> int:
    return sum(getattr(part, "skipped", 0) for part in traffic.cache.components.values())


@pytest.mark.parametrize("core", CORES)
def test_b_caching_is_skipped_when_every_slot_is_pinned(core):
    with plugin(policy="gds"):
        traffic = Traffic(core, slots=SLOTS)
    running = admit(traffic, list(range(30)))
    fill_with_pinned(traffic, SLOTS - 1)
    before = traffic.state_slots()
    traffic.cache.checkpoint(running, up_to=30)
    assert skipped(traffic) == 1
    assert traffic.state_slots() == before
    assert running.kv.holds_mamba
    assert traffic.hit(list(range(40))) == 0
    traffic.let_go()
    traffic.cache.checkpoint(running, up_to=30)
    assert skipped(traffic) == 1
    assert traffic.hit(list(range(40))) == 30
    assert free_slots(traffic) + len(traffic.state_slots()) == SLOTS - 1
    traffic.core.sanity_check([], [])


@pytest.mark.parametrize("core", CORES)
def test_b_sglang_alone_asserts_there(core):
    traffic = Traffic(core, slots=SLOTS)
    running = admit(traffic, list(range(30)))
    fill_with_pinned(traffic, SLOTS - 1)
    with pytest.raises(AssertionError, match="Can not alloc mamba cache"):
        traffic.cache.checkpoint(running, up_to=30)


@pytest.mark.parametrize("core", CORES)
def test_a_prefix_is_not_reused_without_a_slot_for_its_state(core):
    with plugin(policy="gds"):
        traffic = Traffic(core, slots=SLOTS)
    fill_with_pinned(traffic, SLOTS)
    matched = request([*pinned(0), 999])
    matched.init_next_round_input(traffic.cache)
    assert matched.prefix_len == 0
    assert not matched.kv.holds_mamba
    assert skipped(traffic) == 1
    traffic.check()
    traffic.let_go(-1)
    matched.init_next_round_input(traffic.cache)
    assert matched.prefix_len == 10
    assert matched.kv.holds_mamba
    assert skipped(traffic) == 1


@pytest.mark.parametrize("core", CORES)
def test_a_matched_state_does_not_make_room_for_its_own_copy(core):
    """It is the only one that is not pinned: dropping it would leave the prefix without a state."""
    with plugin(policy="gds"):
        traffic = Traffic(core, slots=SLOTS)
    fill_with_pinned(traffic, SLOTS)
    traffic.let_go(0)
    before = traffic.state_slots()
    matched = request([*pinned(0), 999])
    matched.init_next_round_input(traffic.cache)
    assert (matched.prefix_len, matched.kv.holds_mamba) == (0, False)
    assert skipped(traffic) == 1
    assert traffic.state_slots() == before
    traffic.check()


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("by", ["lock", "pin"])
def test_a_leaf_whose_kv_alone_is_locked_loses_its_state_only(core, by):
    """As with SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK; the Rust core dies if asked for such a leaf."""
    with plugin(policy="gds"):
        traffic = Traffic(core, slots=SLOTS)
    tokens = pinned(0)
    traffic.run(tokens)
    node = traffic.match(tokens).best_match_node
    if by == "lock":
        lock = traffic.cache.inc_lock_ref(node, (MAMBA,)).to_dec_params()
    else:
        traffic.core.inc_full_pin(node)
    assert traffic.evict(states=1) == 1
    assert traffic.state_slots() == []
    assert traffic.core.all_values_flatten().numel() == len(tokens)
    if by == "lock":
        traffic.cache.dec_lock_ref(node, lock)
    else:
        traffic.core.dec_full_pin(node)
    assert traffic.evict(kv_tokens=len(tokens)) == 0
    traffic.check()
    assert traffic.core.all_values_flatten().numel() == 0


@pytest.mark.parametrize("core", CORES)
def test_c_a_request_that_needs_three_slots_takes_none_of_two(core):
    with plugin(policy="gds"):
        traffic = Traffic(core, slots=SLOTS, extra_buffer=True)
        fill_with_pinned(traffic, 14)
        waiting = request([5] * 20)
        waiting.init_next_round_input(traffic.cache)
        admission = adder(traffic)
        assert ask(admission, waiting) is AddReqResult.NO_TOKEN
        assert admission.can_run_list == []
        assert free_slots(traffic) == 2
        traffic.let_go()
        assert ask(adder(traffic), waiting) is not AddReqResult.NO_TOKEN
        assert free_slots(traffic) == 2


def test_c_requests_of_one_batch_share_what_is_left():
    """Two need six slots, five can be had: one is admitted, the other waits."""
    with plugin(policy="gds"):
        traffic = Traffic("rust", slots=SLOTS, extra_buffer=True)
        fill_with_pinned(traffic, 11)
        admission = adder(traffic)
        first, second = request([5] * 20), request([6] * 20)
        for req in (first, second):
            req.init_next_round_input(traffic.cache)
        assert ask(admission, first) is not AddReqResult.NO_TOKEN
        assert ask(admission, second) is AddReqResult.NO_TOKEN
        assert admission.can_run_list == [first]


def test_c_slots_set_aside_for_a_batch_can_still_be_had():
    """SGLang sets some aside for the requests it admits in one go: here two of the last three."""
    with plugin(policy="gds"):
        traffic = Traffic("rust", slots=SLOTS, extra_buffer=True)
        fill_with_pinned(traffic, SLOTS - 3)
        states = traffic.requests.mamba_allocator
        states.alloc_group_begin(2)
        assert states.available_size() == 1
        waiting = request([5] * 20)
        waiting.init_next_round_input(traffic.cache)
        assert ask(adder(traffic), waiting) is not AddReqResult.NO_TOKEN
        states.alloc_group_end()
        assert traffic.requests.alloc([waiting]) is not None
        assert free_slots(traffic) == 0


@pytest.mark.parametrize("core", CORES)
def test_c_sglang_alone_admits_and_asserts(core):
    traffic = Traffic(core, slots=SLOTS, extra_buffer=True)
    fill_with_pinned(traffic, 14)
    waiting = request([5] * 20)
    waiting.init_next_round_input(traffic.cache)
    assert ask(adder(traffic), waiting) is not AddReqResult.NO_TOKEN
    with pytest.raises(AssertionError, match="mamba"):
        traffic.requests.alloc([waiting])
