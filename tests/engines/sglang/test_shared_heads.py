"""Requests that are queued together and begin alike compute that once, as SGLang schedules."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from cache_layer import CORES, Traffic, plugin
from schedule_loop import Loop
from scheduled import adder, ask, request
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.runtime_context import get_parallel

from statecache_sglang.seams import slots

HEAD = 2_048


def fan_out(number: int, head: int, tail: int = 100) -> list[list[int]]:
    return [[*range(head), *[1_000_000 + one] * tail] for one in range(number)]


@contextmanager
def loop(core="rust", chunk=8_192, wait="on", slots=64, overlap=False, **given) -> Iterator[Loop]:
    with plugin(policy="gds", wait_for_head=wait, **given):
        traffic = Traffic(core, slots=slots, kv_tokens=200_000, rows=32, longest=24_000)
        yield Loop(traffic, chunk, overlap)


def waits(run: Loop) -> int:
    return counted(run)[0]


def counted(run: Loop) -> list[float]:
    """Requests that waited, steps they were passed over in, tokens they did not compute again."""
    numbers = run.traffic.core.scheduler_side.counts.numbers
    return [numbers.get(f"head_wait{name}", 0) for name in ("s", "_steps", "_saved_tokens")]


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("overlap", [False, True])
def test_six_siblings_compute_their_head_once(core, overlap):
    """2,048 once and six tails of 100 are 2,648; each by itself they are 12,888."""
    with loop(core, overlap=overlap) as run:
        asked = [run.add(tokens) for tokens in fan_out(6, HEAD)]
        assert run.step() == asked[:1]  # up to where they part
        assert waits(run) == 5
        assert run.step() == asked
        run.run()
        assert run.computed == 2_648
        assert [run.hits[req.rid] for req in asked] == [0] + [2_048] * 5
        assert run.chunk_ends[asked[0].rid] == [2_048, 2_148]
        assert run.idle == 0
        assert counted(run) == [5, 5, 5 * 2_048]
        run.traffic.check()


def test_without_it_each_computes_the_head():
    with loop(wait="off") as run:
        for tokens in fan_out(6, HEAD):
            run.add(tokens)
        run.run()
        # 8,192 in a step: the fourth is cut there, and nobody else finds anything.
        assert run.computed > 4 * HEAD
        assert waits(run) == 0


@pytest.mark.parametrize("number", [6, 16])
@pytest.mark.parametrize("chunk", [2_048, 8_192, 65_536])
@pytest.mark.parametrize("head", [16_384, 15_000])
def test_a_long_head_costs_what_it_is(number, chunk, head):
    """At most 1.15 x (head + tails).

    The first one is not served later, but for the step that a cut may cost.
    """
    rng = random.Random(number)
    tails = [rng.randint(64, 4_000) for _ in range(number)]
    ends = {}
    for wait in ("on", "off"):
        with loop(wait=wait, chunk=chunk) as run:
            first, *_ = [
                run.add([*range(head), *[1_000_000 + one] * tail]) for one, tail in enumerate(tails)
            ]
            run.run()
            ends[wait] = run.ended[first.rid]
            if wait == "on":
                assert run.computed <= 1.15 * (head + sum(tails))
                assert run.idle == 0
                run.traffic.check()
    steps, tokens = ends["on"]
    assert steps <= ends["off"][0] + 1
    assert chunk < 8_192 or tokens <= ends["off"][1]


def test_a_request_of_another_kind_is_not_held_up():
    """The first step has room for what is queued behind the siblings."""
    with loop() as run:
        asked = [run.add(tokens) for tokens in fan_out(3, HEAD)]
        other = run.add(list(range(5_000_000, 5_003_000)))
        assert run.step() == [asked[0], other]
        assert run.step() == asked
        run.run()
        assert run.computed == HEAD + 3 * 100 + 3_000


def test_one_that_does_not_fit_beside_a_cut_chunk_comes_next():
    """SGLang has one request at a time in the middle of its prompt."""
    with loop() as run:
        asked = [run.add(tokens) for tokens in fan_out(2, HEAD)]
        large = run.add(list(range(5_000_000, 5_007_000)))
        assert run.step() == asked[:1]
        assert run.step() == [*asked, large]
        run.run()
        assert run.chunk_ends[large.rid] == [7_000]
        assert run.computed == HEAD + 2 * 100 + 7_000


def test_a_sibling_that_comes_later_waits_too():
    """The first is at 1,000 of 3,100 when the second comes; they part at 2,600."""
    with loop(chunk=1_000) as run:
        first = run.add(fan_out(2, 2_600)[0] + [7] * 400)
        run.step()
        second = run.add(fan_out(2, 2_600)[1])
        run.run()
        assert run.chunk_ends[first.rid] == [1_000, 2_000, 2_600, 3_100]
        assert run.hits[second.rid] == 2_600
        assert run.computed == 3_100 + 100
        assert run.idle == 0
        # It is asked where a step has room for it, while the first goes from 2,000 to 2,600.
        assert counted(run) == [1, 1, 600]


@pytest.mark.parametrize("when", ["queued", "first chunk", "later chunk"])
def test_the_others_go_on_at_once_when_the_first_is_aborted(when):
    with loop(chunk=1_500) as run:
        asked = [run.add(tokens) for tokens in fan_out(3, HEAD)]
        if when == "queued":
            run.abort(asked[0])
            assert run.step() == [asked[1]]
        else:
            run.step()
            if when == "later chunk":
                run.step()
            run.abort(asked[0])
            assert asked[1] in run.step()
        run.run()
        assert {req.rid for req in asked[1:]} <= run.ended.keys()
        assert run.idle == 0
        run.traffic.check()


def test_a_head_that_is_not_worth_a_step_is_computed_again():
    """512 tokens are, 511 are not."""
    for head, computed in ((511, 2 * 611), (512, 512 + 200)):
        with loop() as run:
            for tokens in fan_out(2, head):
                run.add(tokens)
            run.run()
            assert run.computed == computed


def test_nobody_waits_for_another_namespace_or_adapter():
    with loop() as run:
        tokens = list(range(HEAD))
        for more in ({}, {"extra_key": "x"}, {"lora_id": "x"}, {"cache_salt": "x"}):
            run.add([*tokens, 1], **more)
        run.step()
        assert waits(run) == 0


def test_a_prompt_that_another_one_continues_is_waited_for():
    """Its own end is the state: no chunk is cut."""
    with loop() as run:
        first, second = run.add(list(range(3_000))), run.add(list(range(3_500)))
        assert run.step() == [first]
        run.run()
        assert run.chunk_ends[first.rid] == [3_000]
        assert run.hits[second.rid] == 3_000
        assert run.computed == 3_500


def test_a_state_that_gets_no_slot_is_not_waited_for_twice():
    """Every slot is pinned but the first one's own: its states are skipped, the second goes on."""
    with loop(slots=4) as run:
        for number in range(2):
            tokens = [9_000_000 + number] * 10
            run.traffic.run(tokens)
            run.traffic.hold(tokens)
        for tokens in fan_out(3, HEAD):
            run.add(tokens)
        run.run()
        assert len(run.ended) == 3
        assert run.idle == 0


def extra_buffer() -> Traffic:
    return Traffic("rust", slots=64, kv_tokens=200_000, rows=32, longest=8_000, extra_buffer=True)


def asked_in_turn(traffic: Traffic, reqs: list) -> list:
    """Ask as one step of the scheduler does; return what was admitted."""
    SchedulePolicy("fcfs", traffic.cache, False, False, False).calc_priority(reqs, None)
    admission = adder(traffic, 8_192)
    for req in reqs:
        req.init_next_round_input(traffic.cache)
        ask(admission, req)
    return admission.can_run_list


def test_with_an_extra_buffer_the_state_is_tracked_inside_the_chunk():
    """1,000 in common, a state every 64: at 960. No chunk is cut, the first one keeps its step."""
    with plugin(policy="gds"):
        traffic = extra_buffer()
        reqs = [request(tokens) for tokens in fan_out(3, 1_000)]
        assert asked_in_turn(traffic, reqs) == reqs[:1]
        assert (reqs[0].mamba_branching_seqlen, reqs[0].extend_end) == (960, 1_100)
        assert [req.kv.holds_mamba for req in reqs] == [False] * 3
        side = traffic.core.scheduler_side
        assert side.counts.numbers["head_waits"] == 2
        side.computed(reqs[0], 1_100)  # and nothing was cached
        assert asked_in_turn(traffic, reqs[1:]) == reqs[1:]


@pytest.mark.parametrize("begin", [0, 64, 100, 640])
@pytest.mark.parametrize("tokens", [10, 64, 100, 640, 1_000])
@pytest.mark.parametrize("branching", [None, 64, 128, 164, 700, 960])
def test_where_the_extra_buffer_has_a_state_is_as_sglang_says(begin, tokens, branching):
    traffic = extra_buffer()
    req = request(list(range(2_000)))
    req.prefix_len, req.extend_end = begin, begin + tokens
    req.mamba_branching_seqlen = branching
    req.kv.mamba_next_track_idx = 0
    batch = SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(mamba_chunk_size=64)),
        tree_cache=traffic.cache,
        req_to_token_pool=traffic.requests,
    )
    with get_parallel().override(dcp_enabled=False):
        ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend(batch, req)
    assert slots.tracked_depth(traffic.cache, req) == req.kv.mamba_last_track_seqlen
