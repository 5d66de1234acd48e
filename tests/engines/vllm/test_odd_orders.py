"""Requests that wait for a head while something else happens to the one that computes it.

Whatever it is: each ends, from its own tokens, and nothing waits while nothing is computed.
"""

import random

import pytest
from scheduled import Run, words
from vllm.lora.request import LoRARequest
from vllm.v1.request import RequestStatus

POOL = {"checkpoints": "native", "checkpoint_slots": 16}
PLUGINS = {"blocks": {}, "pool": POOL}
every_plugin = pytest.mark.parametrize("plugin", PLUGINS)
HEAD = words(random.Random(3), 2048)
SALTED = {"cache_salt": "x"}
ADAPTER = {"lora_request": LoRARequest("x", 1, "x")}


def start(model, plugin, blocks=1200, **more):
    """A scheduler that computes 512 tokens of a request a step."""
    options = {"long_prefill_token_threshold": 512, "length": 4096, **more}
    return Run(model, blocks=blocks, plugin=PLUGINS[plugin], **options)


def burst(model, plugin, **more):
    """One that computes a head, and two that wait for it since the first step."""
    run = start(model, plugin, **more)
    names = [run.add([*HEAD, 400 + number], tokens=3) for number in range(3)]
    assert set(step(run)) == {names[0]}
    assert counted(run)[:2] == [2, 2]
    return run, names


def step(run):
    planned = run.step()
    tokens = planned.num_scheduled_tokens
    assert tokens or not run.scheduler.requests, "requests wait and nothing is computed"
    return tokens


def counted(run):
    numbers = run.scheduler_side.report.counts.numbers
    return [numbers.get(f"head_wait{name}", 0) for name in ("s", "_steps", "_saved_tokens")]


def finish(run):
    """Run to the end; then nothing is held of any request."""
    for _ in range(2_000):
        if not run.scheduler.requests:
            break
        step(run)
    assert not run.scheduler.requests
    run.check()
    assert run.scheduler_side.faults.anomalies == 0
    assert run.scheduler_side.lookup.known == set()
    assert run.pool.get_num_free_blocks() == len(run.pool.blocks) - 1


def lose_all(run):
    """Every block that no request holds loses its name, and no state is in a slot any more."""
    run.pool.evict_blocks({block.block_id for block in run.pool.blocks})
    run.scheduler_side.forget()


@every_plugin
def test_the_head_is_lost_before_the_others_get_it(model, plugin):
    """They had waited: they compute it, each by itself, and wait no second time."""
    run, names = burst(model, plugin)
    for _ in range(3):
        assert set(step(run)) == {names[0]}
    run.scheduler.finish_requests([names[0]], RequestStatus.FINISHED_ABORTED)
    lose_all(run)
    assert set(step(run)) == set(names[1:])
    assert [run.cached[name] for name in names[1:]] == [0, 0]
    assert counted(run) == [2, 8, 0]
    finish(run)


@every_plugin
def test_one_that_was_lost_is_waited_for_by_newer_ones(model, plugin):
    """Two compute the head anew; one that comes then waits for the first of them."""
    run, names = burst(model, plugin)
    run.scheduler.finish_requests([names[0]], RequestStatus.FINISHED_ABORTED)
    lose_all(run)
    assert set(step(run)) == set(names[1:])
    late = run.add([*HEAD, 410])
    for _ in range(3):
        assert set(step(run)) == set(names[1:])
    assert late in step(run)
    assert run.cached[late] == 2048
    finish(run)


@every_plugin
@pytest.mark.parametrize("between", [False, True])
def test_one_that_waits_is_aborted_while_a_step_runs(model, plugin, between):
    """Before the step is planned, or between its plan and its report."""
    run, names = burst(model, plugin)
    planned = run.schedule() if between else None
    run.scheduler.finish_requests(names[1:2], RequestStatus.FINISHED_ABORTED)
    if planned is not None:
        run.report(planned)
    finish(run)
    assert run.cached[names[2]] == 2048
    assert names[1] not in run.cached


@every_plugin
def test_the_first_is_aborted_between_plan_and_report(model, plugin):
    run, names = burst(model, plugin)
    planned = run.schedule()
    run.scheduler.finish_requests(names[:1], RequestStatus.FINISHED_ABORTED)
    run.report(planned)
    assert set(step(run)) == set(names[1:])
    finish(run)


@every_plugin
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_the_first_is_preempted_for_want_of_blocks(model, plugin, policy):
    """Two that decode take blocks until the one that computes the head is preempted.

    The others had waited: they go on, each by itself, and so does the first.
    """
    run = Run(
        model,
        blocks=232,
        plugin=PLUGINS[plugin],
        length=4096,
        scheduling_policy=policy,
        long_prefill_token_threshold=64,
    )
    old = [run.add(words(random.Random(at), 700), tokens=120) for at in (7, 8)]
    for _ in range(14):
        step(run)
    names = [run.add([*HEAD, 400 + number], tokens=3, priority=1) for number in range(3)]
    preempted = set()
    for _ in range(2_000):
        if not run.scheduler.requests:
            break
        step(run)
        requests = run.scheduler.requests.values()
        preempted |= {each.request_id for each in requests if each.num_preemptions}
    assert names[0] in preempted
    assert set(run.cached) == {*old, *names}
    finish(run)


@every_plugin
@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_more_urgent_one_waits_for_a_less_urgent_one_that_computes(model, plugin, first):
    """Under priority scheduling, whichever comes first; one that is urgent has the head soonest."""
    run = start(model, plugin, scheduling_policy="priority")
    names = [run.add([*HEAD, 400], tokens=3, priority=first)]
    step(run)
    names += [run.add([*HEAD, 401 + n], tokens=3, priority=n) for n in range(3)]
    while names[1] not in run.cached:
        assert len(step(run)) in (1, 4)
    assert [run.cached[name] for name in names[1:]] == [2048] * 3
    finish(run)


@every_plugin
@pytest.mark.parametrize("other", [SALTED, ADAPTER], ids=["salt", "adapter"])
def test_each_namespace_has_a_head_of_its_own(model, plugin, other):
    """Two of each kind: one of each computes, one of each waits for its own."""
    run = start(model, plugin)
    base = [run.add([*HEAD, 400 + n]) for n in range(2)]
    theirs = [run.add([*HEAD, 400 + n], **other) for n in range(2)]
    assert set(step(run)) == {base[0], theirs[0]}
    finish(run)
    assert [run.cached[name] for name in [*base, *theirs]] == [0, 2048, 0, 2048]
    assert counted(run) == [2, 8, 2 * 2048]


@every_plugin
def test_one_token_is_asked_for(model, plugin):
    """The first ends with its prompt; the head's state is there for the others all the same."""
    run = Run(model, blocks=1200, plugin=PLUGINS[plugin], length=4096, budget=4096)
    names = [run.add([*HEAD, 400 + n], tokens=1) for n in range(3)]
    finish(run)
    assert [run.cached[name] for name in names] == [0, 2048, 2048]


@every_plugin
def test_a_prompt_of_the_head_alone_is_the_first(model, plugin):
    """2,048 tokens: its own last token is computed, so its last full block ends at 2,032."""
    run = Run(model, blocks=1200, plugin=PLUGINS[plugin], length=4096, budget=4096)
    names = [run.add(HEAD, tokens=1), *(run.add([*HEAD, 400 + n], tokens=1) for n in range(2))]
    finish(run)
    assert run.cached[names[0]] == 0
    assert min(run.cached[name] for name in names[1:]) >= 2032
