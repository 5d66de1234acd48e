"""Requests that wait for a head while something else happens to the one that computes it.

Whatever it is: each ends, from a state of its own tokens, and nothing waits while nothing runs.
"""

from contextlib import contextmanager

import pytest
from cache_layer import CORES, Traffic, plugin
from schedule_loop import Loop
from test_shared_heads import HEAD, counted, fan_out

both_cores = pytest.mark.parametrize("core", CORES)
POOLS = {
    "active": {"policy": "gds"},
    "learned": {"policy": "learned", "admission": "branch-points"},
    "int8": {"policy": "gds", "checkpoints": "int8", "checkpoint_slots": 24},
}
every_pool = pytest.mark.parametrize("pool", POOLS)


@contextmanager
def loop(core, pool, chunk=512, **more):
    with plugin(**POOLS[pool]):
        traffic = Traffic(core, slots=64, kv_tokens=60_000, rows=32, longest=4_000)
        run = Loop(traffic, chunk, **more)
        yield run
        while run.queue or run.chunked or run.in_flight:
            run.step()
            assert run.idle == 0
            assert run.steps < 1_000
        traffic.check()
        assert traffic.cache.mamba_protected_size() == 0


def lose_all(run):
    """Whatever no request holds leaves the cache."""
    run.traffic.evict(kv_tokens=run.traffic.kv_tokens)


@both_cores
@every_pool
@pytest.mark.parametrize("overlap", [False, True])
def test_the_head_is_lost_before_the_others_get_it(core, pool, overlap):
    """The first is aborted with its last chunk on the way: two compute the head, and wait no more.

    A head of three chunks and 600 tokens, cut there: the others are passed over in that step alone,
    which has room for them.
    """
    with loop(core, pool, chunk=1_000, overlap=overlap) as run:
        asked = [run.add(tokens) for tokens in fan_out(3, 3_600)]
        for _ in range(4):
            assert run.step() == asked[:1]
        assert counted(run) == [2, 2, 0]
        run.abort(asked[0])
        run.step()
        lose_all(run)
        run.run()
        assert asked[0].rid not in run.ended
        assert {req.rid for req in asked[1:]} == run.ended.keys()
        assert counted(run)[0] == 2


@both_cores
@every_pool
def test_a_prompt_that_ended_is_lost_before_another_one_continues_it(core, pool):
    """It waited for the end of 3,000 tokens, which is gone when it is asked again."""
    with loop(core, pool, chunk=8_192) as run:
        first, second = run.add(list(range(3_000))), run.add(list(range(3_500)))
        assert run.step() == [first]
        lose_all(run)
        assert run.step() == [second]
        assert run.hits[second.rid] == 0
        assert counted(run) == [1, 1, 0]


@both_cores
@every_pool
@pytest.mark.parametrize(
    "other", [{"extra_key": "x"}, {"cache_salt": "x"}, {"lora_id": "x"}], ids=str
)
def test_each_namespace_has_a_head_of_its_own(core, pool, other):
    """Two of each kind: one of each computes, one of each waits for its own.

    SGLang has one request at a time in the middle of its prompt: the second kind comes next.
    """
    with loop(core, pool, chunk=8_192) as run:
        prompts = fan_out(2, HEAD)
        base = [run.add(tokens) for tokens in prompts]
        theirs = [run.add(tokens, **other) for tokens in prompts]
        assert run.step() == base[:1]
        assert run.step() == [*base, theirs[0]]
        run.run()
        hits = [run.hits[req.rid] for req in [*base, *theirs]]
        assert hits == [0, HEAD, 0, HEAD]
        assert counted(run)[2] == 2 * HEAD


@both_cores
@every_pool
def test_with_whole_prompts_in_a_step_nothing_is_cut(core, pool):
    """Without chunks siblings compute the head each; a prompt that another one continues serves."""
    with loop(core, pool, chunk=None) as run:
        asked = [run.add(tokens) for tokens in fan_out(2, HEAD)]
        longer = run.add([*fan_out(1, HEAD)[0], *[5] * 600])
        assert run.step() == asked
        assert run.step() == [longer]
        assert [run.hits[req.rid] for req in [*asked, longer]] == [0, 0, HEAD + 100]
        assert counted(run) == [1, 1, HEAD + 100]


@both_cores
@every_pool
@pytest.mark.parametrize("first", [0, 5, 9])
def test_a_more_urgent_one_waits_for_a_less_urgent_one_that_computes(core, pool, first):
    with loop(core, pool, chunk=1_500, by_priority=True) as run:
        prompts = fan_out(4, HEAD)
        leader = run.add(prompts[0])
        leader.priority = first
        assert run.step() == [leader]
        asked = [run.add(tokens) for tokens in prompts[1:]]
        for number, req in enumerate(asked):
            req.priority = 5 + number
        assert run.step() == [leader]  # cut where the others part from it
        run.run()
        assert [run.hits[req.rid] for req in asked] == [HEAD] * 3
        # 548 tokens beyond the state that its first chunk left.
        assert counted(run) == [3, 3, 3 * (HEAD - 1_500)]


@both_cores
@every_pool
@pytest.mark.parametrize("gone", [1, 2])
@pytest.mark.parametrize("overlap", [False, True])
def test_one_that_waits_is_aborted(core, pool, gone, overlap):
    """What it holds is given back at once, and the others get the head."""
    with loop(core, pool, chunk=4_096, overlap=overlap) as run:
        asked = [run.add(tokens) for tokens in fan_out(3, HEAD)]
        assert run.step() == asked[:1]
        run.abort(asked[gone])
        run.run()
        left = asked[3 - gone]
        assert run.hits[left.rid] == HEAD
        assert asked[gone].rid not in run.hits
        assert counted(run) == [2, 2, HEAD]


@both_cores
@every_pool
def test_the_second_is_aborted_as_it_resumes_and_a_third_comes(core, pool):
    with loop(core, pool, chunk=4_096) as run:
        asked = [run.add(tokens) for tokens in fan_out(3, HEAD)]
        run.step()
        assert run.step() == asked
        run.abort(asked[1])
        late = run.add(fan_out(5, HEAD)[4])
        run.run()
        assert run.hits[late.rid] == HEAD
