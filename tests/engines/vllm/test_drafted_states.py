"""With a drafter no state is stored, named or served that is not its prefix's, and faults are seen.

The real scheduler and its processing of results; the workers' states are marks.
"""

import pytest
from drafted import FAULTS, DraftedWorker, conversations
from scheduled import Drafter, Run, without_states
from test_soak import check

POOL = {"checkpoints": "native", "checkpoint_slots": 10}
# A drafter, and the chance that a draft is accepted.
DRAFTERS = {
    "mtp": (Drafter("mtp", 2), 0.18),
    "mtp, all accepted": (Drafter("mtp", 3), 1.0),
    "mtp, none accepted": (Drafter("mtp", 1), 0.0),
    "own group of KV": (Drafter("mtp", 3, own_group=True), 0.6),
    "ngram": (Drafter("ngram", 2), 0.6),
}


def served(model, plugin, drafter, accept, requests, *, overlapped=False, **more):
    shape = {"blocks": 90, "budget": 64, "overlapped": overlapped}
    run = Run(model, plugin=plugin, drafter=drafter, **shape)
    worker = DraftedWorker(run, drafter.tokens, accept, **more)
    for _ in conversations(run, worker, seed=1, look_at_names=True):
        if run._count >= requests:
            break
    if "fault" not in more and run.scheduler_side.queue is not None:
        check(run)
    return run, worker


@pytest.mark.parametrize("kind", DRAFTERS)
def test_every_state_is_that_of_its_prefix(drafting, kind, share):
    drafter, accept = DRAFTERS[kind]
    plugin = {**POOL, "checkpoint_interval": 64}
    run, worker = served(drafting, plugin, drafter, accept, max(60, int(200 * share)))
    assert worker.wrong == {}
    assert min(worker.names, worker.stores, worker.restores, worker.drafted) > 10
    counts = run.scheduler_side.report.counts.numbers
    assert counts["draft_tokens"] == worker.drafted
    assert counts["accepted_tokens"] == worker.kept
    assert (worker.kept == 0, worker.kept == worker.drafted) == (accept == 0.0, accept == 1.0)


@pytest.mark.parametrize(
    "plugin",
    [
        {},
        {"block_policy": "stock"},
        {**POOL, "policy": "learned"},
        {**POOL, "admission": "branch-points"},
        {**POOL, "checkpoints": "int8"},
    ],
)
def test_so_it_is_by_policy_and_kind_of_pool_and_with_late_reports(drafting, plugin, share):
    drafter, accept = DRAFTERS["mtp"]
    requests = max(60, int(150 * share))
    _, worker = served(drafting, plugin, drafter, accept, requests, late=True)
    assert worker.wrong == {}
    assert (worker.restores > 10) is ("checkpoints" in plugin)


OVERLAPPED = {**POOL, "checkpoint_interval": 64}


@pytest.mark.parametrize("kind", ["mtp", "own group of KV", "ngram"])
def test_so_it_is_where_a_step_is_planned_before_the_last_one_is_done(drafting, kind, share):
    """VLLM's asynchronous scheduler, which assumes that all drafts will be accepted."""
    drafter, accept = DRAFTERS[kind]
    requests = max(60, int(200 * share))
    _, worker = served(drafting, OVERLAPPED, drafter, accept, requests, overlapped=True)
    assert worker.wrong == {}
    assert min(worker.stores, worker.restores, worker.drafted) > 10


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(drafting, fault):
    plugin = {**POOL, "checkpoint_interval": 64}
    _, worker = served(drafting, plugin, Drafter("mtp", 3), 0.6, 120, fault=fault)
    assert sum(worker.wrong.values()) > 5


@pytest.mark.parametrize(
    ("drafter", "hit", "lost"),
    [
        (Drafter("mtp", 2), 80, 16),
        (Drafter("mtp", 2, own_group=True), 80, 16),
        (Drafter("ngram", 2), 96, 0),
    ],
)
def test_what_a_drafter_costs_in_hits_is_counted_and_is_no_missing_state(
    drafting, drafter, hit, lost
):
    """100 tokens, twice, in blocks of 16: six are cached, and vLLM computes the sixth again."""
    run = Run(drafting, blocks=90, plugin=POOL, drafter=drafter)
    run.step = DraftedWorker(run, drafter.tokens, 0.5).step
    prompt = list(range(3, 103))
    assert (run.ask(prompt), run.ask(prompt)) == (0, hit)
    counts = run.scheduler_side.report.counts.numbers
    assert counts["hit_tokens"] == hit
    assert counts.get("draft_lost_tokens", 0) == lost
    assert counts.get("missed_by_state_tokens", 0) == 0


@pytest.mark.parametrize("own_group", [False, True])
def test_what_a_missing_state_costs_is_not_put_down_to_the_drafter(drafting, own_group):
    """100 tokens, twice, in blocks of 16; the states are dropped: nobody would find one."""
    run = Run(drafting, blocks=90, plugin={}, drafter=Drafter("mtp", 2, own_group=own_group))
    run.step = DraftedWorker(run, 2, 0.5).step
    prompt = list(range(3, 103))
    run.ask(prompt)
    without_states(run)
    assert run.ask(prompt) == 0
    counts = run.scheduler_side.report.counts.numbers
    assert counts["missed_by_state_tokens"] == 80
    assert counts.get("draft_lost_tokens", 0) == 0


def test_the_kv_of_a_drafters_own_group_is_looked_up_once(drafting, monkeypatch):
    """Reach, restore and count of one lookup need it, each again at the next lookup."""
    run = Run(drafting, blocks=90, plugin=POOL, drafter=Drafter("mtp", 2, own_group=True))
    run.step = DraftedWorker(run, 2, 0.5).step
    prompt = list(range(3, 103))
    run.ask(prompt)
    without_states(run)
    request = run.scheduler.requests[run.add(prompt)]
    manager = run.scheduler.kv_cache_manager
    original, asked = manager.coordinator.find_longest_cache_hit_per_group, []

    def counted(*given):
        asked.append(given)
        return original(*given)

    monkeypatch.setattr(manager.coordinator, "find_longest_cache_hit_per_group", counted)
    for lookups in (1, 2):
        assert manager.get_computed_blocks(request)[1] == 80
        assert len(asked) == lookups
