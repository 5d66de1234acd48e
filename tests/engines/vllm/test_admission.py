"""Which states are in the checkpoint pool after requests worked out by hand, by admission.

Blocks of 16 tokens. A has 100 tokens: 6 full blocks. B has the first 50 of them, so its KV is
cached up to block 3, and 50 of its own.
"""

import pytest
from scheduled import Run

from statecache.errors import SettingsError

A = list(range(3, 103))
B = A[:50] + list(range(203, 253))
POOL = {"checkpoints": "native", "checkpoint_slots": 64}


def states(run, prompt):
    """After how many blocks of this prompt there is a state."""
    tree = run.scheduler_side.checkpoints.tree
    name = run.add(prompt)
    hashes = run.scheduler.requests[name].block_hashes
    path = list(hashes[: len(prompt) // run.block])
    found = sorted(tree.depth_of(state) for state in tree.on(path))
    run.scheduler.finish_requests([name], run.aborted)
    return found


def served(model, *prompts, budget=8192, **given):
    from vllm.v1.request import RequestStatus

    run = Run(model, blocks=200, plugin={**POOL, **given}, budget=budget)
    run.aborted = RequestStatus.FINISHED_ABORTED
    for prompt in prompts:
        run.ask(prompt)
    assert run.scheduler_side.faults.anomalies == 0
    run.scheduler_side.checkpoints.check()
    return run


@pytest.mark.parametrize("policy", ["gds", "learned"])
@pytest.mark.parametrize(
    ("given", "of_a", "of_b"),
    [
        ({"checkpoint_interval": 32}, [2, 3, 4, 6], [2, 3, 4, 6]),
        ({"checkpoint_interval": 32, "admission": "dense"}, [2, 3, 4, 6], [2, 3, 4, 6]),
        ({"admission": "branch-points"}, [3, 6], [3, 6]),
        ({"admission": "dense"}, [3, 6], [3, 6]),  # every 8,192 tokens: none
    ],
)
def test_prompt_ends_forks_and_every_interval(model, policy, given, of_a, of_b):
    run = served(model, A, B, policy=policy, **given)
    assert (states(run, A), states(run, B)) == (of_a, of_b)


def test_ends_and_forks_alone_where_the_budget_would_end_chunks(model):
    """A budget of 48 tokens ends a chunk of A after block 3, which is no place for a state."""
    assert states(served(model, A, budget=48, admission="branch-points"), A) == [6]
    run = served(model, A, B, budget=48, admission="branch-points")
    assert (states(run, A), states(run, B)) == ([3, 6], [3, 6])


def test_interval_states_of_a_prompt_never_take_the_slot_of_its_only_state(model):
    """One slot: the first state, at block 2, stays until that of the end, at block 6."""
    seen = []
    run = served(model, checkpoint_slots=1, checkpoint_interval=32)
    checkpoints = run.scheduler_side.checkpoints
    store = checkpoints.prepare_store

    def watched(path, **which):
        made = store(path, **which)
        seen.append(
            (len(path), made is not None, [checkpoints.tree.depth_of(s) for s in checkpoints._slot])
        )
        return made

    checkpoints.prepare_store = watched
    run.ask(A)
    assert seen == [(2, True, [2]), (4, False, [2]), (6, True, [6])]
    assert checkpoints.counts.skipped == 1


def test_an_interval_state_may_take_the_slot_of_another_prompt(model):
    """B's own interval states find A's state as the victim."""
    run = served(model, A, list(range(300, 400)), checkpoint_slots=1, checkpoint_interval=32)
    assert states(run, A) == []


def test_what_excludes_another_is_refused():
    from statecache.engine.settings import Settings

    with pytest.raises(SettingsError, match="exclude each other"):
        Settings.from_given(
            {
                "kv_cache_plugin": "statecache",
                "admission": "branch-points",
                "checkpoint_interval": 32,
            },
            {},
        )


def test_a_policy_without_a_pool_is_refused_where_it_was_asked_for(model):
    """As the default it rules nothing then."""
    Run(model, blocks=40, plugin={})
    for policy in ("learned", "lru"):
        message = f"--statecache-policy {policy} needs --statecache-checkpoints"
        with pytest.raises(SystemExit, match=message):
            Run(model, blocks=40, plugin={"policy": policy})
