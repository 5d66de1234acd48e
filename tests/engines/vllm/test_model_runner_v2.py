"""The order of restore, forward, store and report in vLLM's model runner V2, which needs a GPU.

With a drafter V2 reports before it stores.
"""

import random

import pytest
from runner_v2 import every_order, started
from scheduled import traffic, without_states, words


@every_order
def test_a_step_restores_first_and_stores_last(monkeypatch, model, drafts):
    """A prompt of 40 tokens, two blocks and a half: one step each time."""
    with started(monkeypatch, model, drafts=drafts) as (run, runner):
        prompt = words(random.Random(0), 40)
        assert run.ask(prompt) == 0
        without_states(run)
        runner.log.clear()
        assert run.ask(prompt) == 32
        around = ["report", "draft", "store"] if drafts else ["store", "report"]
        assert runner.log == ["restore", "blocks", "forward", *around]
        assert len(run.restores) == 1


@every_order
@pytest.mark.parametrize(("mode", "lag"), [("native", 0), ("int8", 0), ("int8", 1), ("int8", 2)])
def test_every_request_goes_on_from_its_own_state(monkeypatch, model, drafts, mode, lag):
    """Under pressure, with preemptions, aborts and evictions: `compute` looks at each state.

    Some stores of int8 are refused, and now and then all is forgotten.
    """
    rng = random.Random(3)
    with started(monkeypatch, model, drafts=drafts, mode=mode, lag=lag, blocks=70) as (run, runner):
        for at, _ in enumerate(traffic(run, 2, 300)):
            runner.poisoned = mode == "int8" and rng.random() < 0.1
            run.check()
            if at % 50 == 49:
                without_states(run)
            if rng.random() < 0.02:
                run.scheduler.reset_prefix_cache(reset_running_requests=True)
        for _ in range(2 + lag):
            run.step()
        checkpoints = run.scheduler_side.checkpoints
        counts = checkpoints.counts
        assert counts.stored > 50
        assert counts.restored > 2
        assert (counts.refused > 2) == (mode == "int8")
        assert checkpoints.pinned == 0
        assert run.scheduler_side.faults.anomalies == 0
        assert run.scheduler_side.reports.waits == {}
        checkpoints.check()
