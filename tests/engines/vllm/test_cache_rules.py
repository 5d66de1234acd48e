"""What broken state caches elsewhere got wrong, on vLLM's real scheduler and block pool.

A warm answer equals a cold one in test_outputs.py and test_server.py; speculative decoding is
in test_drafted_states.py; free + used = all blocks after every step in test_guard.py, too.
`Shadow` checks in every one of them that a request resumes from its own state.
"""

import random

import pytest
from scheduled import GROUPS, Run, traffic, words
from vllm.v1.request import RequestStatus

from statecache_vllm import seams

POOL = {"checkpoints": "native", "checkpoint_slots": 16}
PLUGINS = {
    "reuse": {},
    "reuse and pool": POOL,
    "stock and pool": {**POOL, "block_policy": "stock"},
}
every_plugin = pytest.mark.parametrize("plugin", PLUGINS)


def check_kv(run: Run, planned) -> int:
    """Every block of KV below a hit holds what the request would compute there."""
    hits = 0
    for new_request in planned.scheduled_new_reqs:
        depth = new_request.num_computed_tokens // run.block
        request = run.scheduler.requests[new_request.req_id]
        ids = run.scheduler.kv_cache_manager.get_block_ids(new_request.req_id)[GROUPS]
        for at in range(depth):
            key = seams.key_of(request.block_hashes[at], GROUPS)
            assert run.pool.blocks[ids[at]].block_hash == key
        hits += depth > 0
    return hits


@every_plugin
def test_a_hit_is_never_deeper_than_its_kv_or_its_state(model, plugin):
    run = Run(model, blocks=70, plugin=PLUGINS[plugin])
    hits, schedule = 0, run.schedule

    def checked():
        nonlocal hits
        planned = schedule()
        hits += check_kv(run, planned)
        return planned

    run.schedule = checked
    for _ in traffic(run, 2, 300):
        run.check()
    assert hits > 10
    assert run.shadow.resumed >= hits
    assert run.scheduler_side.faults.anomalies == 0


@every_plugin
def test_an_aborted_chunked_prefill_gives_everything_back(model, plugin):
    """Two of five chunks of 64 tokens are through; a store of them may be on its way."""
    run = Run(model, blocks=70, plugin=PLUGINS[plugin], budget=64)
    prompt = words(random.Random(1), 300)
    name = run.add(prompt)
    for _ in range(2):
        run.step()
    planned = run.schedule()
    assert 0 < run.scheduler.requests[name].num_computed_tokens < 300
    run.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
    run.report(planned)
    run.step()
    scheduler_side = run.scheduler_side
    assert run.pool.get_num_free_blocks() == 69
    run.check()
    for kept in (
        scheduler_side.stores.requests,
        scheduler_side.lookup.known,
        scheduler_side.report._found,
    ):
        assert not kept
    if scheduler_side.checkpoints is not None:
        scheduler_side.checkpoints.check()
        assert scheduler_side.checkpoints.pinned == 0
    assert run.ask(prompt) <= 192


@every_plugin
def test_an_admission_that_failed_takes_nothing(model, plugin):
    """Seven requests of 160 tokens want 70 blocks and more: some of them wait, then all end."""
    run = Run(model, blocks=70, plugin=PLUGINS[plugin])
    rng, waited = random.Random(3), 0
    for _ in range(7):
        run.add(words(rng, 160), tokens=8)
    while run.scheduler.has_unfinished_requests():
        run.step()
        waited += len(run.scheduler.waiting) > 0
        run.check()
        held = sum(block.ref_cnt > 0 for block in run.pool.blocks)
        assert held + run.pool.get_num_free_blocks() == 69  # all but the null block
        checkpoints = run.scheduler_side.checkpoints
        if checkpoints is not None:
            checkpoints.check()
            assert 0 <= checkpoints.pinned <= len(checkpoints) <= checkpoints.slots
    assert waited > 0
    assert run.pool.get_num_free_blocks() == 69
