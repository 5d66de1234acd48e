"""What becomes of a store is told a step later or more: nobody waits, and no wrong state is served.

The plugin's real halves around vLLM's scheduler; the device comes to what it was given some steps
later.
"""

import random
import types

import pytest
from runner_v2 import every_order, started
from scheduled import without_states, words
from vllm.v1.request import RequestStatus

from statecache_vllm import awaited_reports

# Two blocks and a half: a step that stores the state after 32 tokens, and one more.
PROMPT = words(random.Random(0), 40)


@pytest.fixture(params=[2, 3])
def late(monkeypatch, model, request):
    with started(monkeypatch, model, drafts=False, mode="int8", lag=request.param) as both:
        yield both


def steps_of(run, prompt):
    """Ask, and return the cached tokens and how many steps that took."""
    name, steps = run.add(prompt), 0
    while run.scheduler.has_unfinished_requests():
        run.step()
        steps += 1
    return run.cached[name], steps


@every_order
@pytest.mark.parametrize(
    ("mode", "lag", "waits"), [("native", 3, 0), ("int8", 1, 0), ("int8", 2, 1), ("int8", 3, 2)]
)
def test_a_state_without_a_report_is_a_hit_for_the_next_request(
    monkeypatch, model, drafts, mode, lag, waits
):
    """Exact copies are there at once; for others a request waits, in steps that compute nothing."""
    with started(monkeypatch, model, drafts=drafts, mode=mode, lag=lag) as (run, _):
        assert steps_of(run, PROMPT) == (0, 2)
        without_states(run)
        assert steps_of(run, PROMPT) == (32, 1 + waits)
        assert len(run.restores) == 1
        assert run.scheduler_side.reports.waits == {}


def test_a_state_that_is_refused_is_not_waited_for_again(late):
    """The request is computed, without the state, once that is known."""
    run, runner = late
    runner.poisoned = True
    assert steps_of(run, PROMPT) == (0, 2)
    without_states(run)
    runner.poisoned = False
    assert steps_of(run, PROMPT) == (0, 2 + runner.lag - 1)
    counts = run.scheduler_side.checkpoints.counts
    assert (counts.refused, counts.restored, run.scheduler_side.faults.anomalies) == (1, 0, 0)


@pytest.mark.parametrize("mode", ["native", "int8"])
def test_the_state_of_the_last_step_before_the_engine_idles_is_a_hit(monkeypatch, model, mode):
    """Nine answers: the last step leaves the state after 48 tokens, of three whole blocks."""
    plugin = {"checkpoints": mode, "checkpoint_slots": 24, "checkpoint_interval": 16}
    with started(monkeypatch, model, drafts=False, lag=1, plugin=plugin) as (run, _):
        name = run.add(PROMPT, tokens=9)
        request = run.scheduler.requests[name]
        run.finish()
        assert run.scheduler_side.checkpoints.pinned == 1
        without_states(run)
        waits = 0 if mode == "native" else 1
        assert steps_of(run, [*request.all_token_ids, 5]) == (48, 1 + waits)


def abort(run, name):
    run.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)


def preempt(run, name):
    request = run.scheduler.requests[name]
    run.scheduler.running.remove(request)
    run.scheduler._preempt_request(request, 0.0)


@pytest.mark.parametrize("end", [abort, preempt])
def test_a_request_that_ends_before_its_state_is_reported_leaves_it_to_others(late, end):
    run, _ = late
    first, checkpoints = run.add(PROMPT, tokens=4), run.scheduler_side.checkpoints
    run.step()
    assert checkpoints.pinned == 1
    end(run, first)
    without_states(run)
    assert steps_of(run, PROMPT)[0] == 32
    assert (checkpoints.pinned, checkpoints.counts.stored) == (0, 1)
    assert run.scheduler_side.faults.anomalies == 0
    checkpoints.check()


@pytest.mark.parametrize("running", [False, True])
def test_a_report_from_before_a_reset_publishes_nothing(late, running):
    """A state stored in the same slot since is refused: the old report must not speak for it."""
    run, runner = late
    name = run.add(PROMPT, tokens=3 if running else 1)
    for _ in range(1 if running else 2):
        run.step()
    checkpoints = run.scheduler_side.checkpoints
    assert (name in run.scheduler.requests, checkpoints.pinned) == (running, 1)
    run.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert (len(checkpoints), checkpoints.pinned) == (0, 0)
    runner.poisoned = True
    steps_of(run, PROMPT)
    without_states(run)
    runner.poisoned = False
    assert steps_of(run, PROMPT)[0] == 0
    counts = checkpoints.counts
    assert (counts.stored, counts.restored, counts.refused) == (0, 0, 1)
    for _ in range(runner.lag):
        run.step()
    assert counts.stored == 1
    checkpoints.check()


def test_a_lost_report_ends_a_wait_after_so_many_steps(late, monkeypatch):
    run, _ = late
    monkeypatch.setattr(awaited_reports, "_MOST_WAITS", 5)
    monkeypatch.setattr(run.connector_v2.kv_connector, "build_connector_worker_meta", lambda: None)
    steps_of(run, PROMPT)
    without_states(run)
    assert steps_of(run, PROMPT) == (0, 2 + 5)
    assert run.scheduler_side.checkpoints.pinned == 1


def test_a_request_waits_for_one_report():
    """Another one stores deeper states meanwhile: it goes on with what is good by then."""
    reports, request = awaited_reports.AwaitedReports(), types.SimpleNamespace(request_id="r")
    asked = [reports.must_wait(request, state) for state in (4, 4, 5, 6)]
    assert asked == [True, True, False, False]
    reports.finished(request)
    assert reports.must_wait(request, 6)


def test_others_go_on_while_one_waits(late):
    run, _ = late
    steps_of(run, PROMPT)
    without_states(run)
    waiting, other = run.add(PROMPT), run.add(words(random.Random(2), 20))
    run.step()
    assert other in run.cached
    assert waiting not in run.cached
    run.finish()
    assert run.cached[waiting] == 32
