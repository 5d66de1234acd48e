"""The adapter on vLLM's real scheduler, cache manager and block pool, without a model."""

import random

import pytest
from scheduled import Run, traffic, without_states, words
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue
from vllm.v1.request import RequestStatus

from statecache._blocks import FifoQueue
from statecache.engine.seams import has
from statecache_vllm.engine_paths import MANAGER

ORDERS = ["stock", "reuse"]
POOL = {"checkpoints": "native", "checkpoint_slots": 64}
PLUGINS = {
    **{order: {"block_policy": order} for order in ORDERS},
    "pool": POOL,
    "stock and pool": {**POOL, "block_policy": "stock"},
    "pool by learned": {**POOL, "policy": "learned", "checkpoint_slots": 16},
}


@pytest.mark.parametrize("plugin", PLUGINS)
def test_no_block_is_lost_or_doubled(model, share, plugin):
    """20,000 steps, each with allocations, frees, hits and evictions, in pieces of 2,000."""
    for seed in range(10):
        run = Run(model, blocks=70, plugin=PLUGINS[plugin])
        for number, _ in enumerate(traffic(run, seed, int(2000 * share))):
            if number % 20 == 0:
                run.check()
        run.check()
        if "pool" in plugin:
            run.scheduler_side.checkpoints.check()
            assert len(run.restores) > 0
        assert run.shadow.resumed > 0
        assert run.scheduler_side.faults.anomalies == 0
        assert run.scheduler_side.stores.requests == {}
        assert run.scheduler_side.lookup.known == set()
        assert run.pool.get_num_free_blocks() == 69
        assert run.scheduler.kv_cache_manager.reset_prefix_cache()
        run.check()


def allocated(run, seed, steps):
    """Every block handed out, in order."""
    taken = []
    pool = run.pool
    original = pool.get_new_blocks

    def get_new_blocks(count):
        blocks = original(count)
        taken.extend(block.block_id for block in blocks)
        return blocks

    pool.get_new_blocks = get_new_blocks
    for _ in traffic(run, seed, steps):
        pass
    return taken


def with_vllms_own_queue(run):
    """The same connector with vLLM's queue: a connector alone changes when blocks are freed.

    With any connector `Scheduler._connector_finished` of vLLM 0.32 frees what a finished request
    no longer needs in a call of its own, so blocks come back in another order than without one.
    """
    blocks = run.pool.free_block_queue.get_all_free_blocks()
    for block in blocks:
        block.prev_free_block = block.next_free_block = None
    run.pool.free_block_queue = FreeKVCacheBlockQueue(blocks)
    return run


def test_stock_through_the_plugin_is_vllm_block_for_block(model, share):
    steps = int(4000 * share)
    stock = {"block_policy": "stock"}
    vllms = allocated(with_vllms_own_queue(Run(model, blocks=70, plugin=stock)), 1, steps)
    ours = allocated(Run(model, blocks=70, plugin=stock), 1, steps)
    assert len(vllms) > steps
    assert ours == vllms


def test_the_native_queue_in_vllms_order_is_vllms_block_for_block(model, share):
    """Beside a checkpoint pool that takes nothing, so that no state is kept apart or restored."""
    steps = int(4000 * share)
    stock = {"block_policy": "stock", "checkpoint_interval": 8192}
    vllms = allocated(with_vllms_own_queue(Run(model, blocks=70, plugin=stock)), 1, steps)
    native = Run(model, blocks=70, plugin={**POOL, **stock})
    native.scheduler_side.checkpoints.prepare_store = lambda _path, **_: None
    ours = allocated(native, 1, steps)
    assert isinstance(native.scheduler_side.queue, FifoQueue)
    assert native.scheduler_side.faults.anomalies == 0
    assert len(vllms) > steps
    assert ours == vllms


def test_the_orders_differ(model):
    taken = [allocated(Run(model, blocks=70, plugin={"block_policy": o}), 1, 300) for o in ORDERS]
    assert taken[0] != taken[1]


def report(run):
    """64 prompts in 8 groups of 1,500 shared tokens and 700 of their own, one at a time."""
    rng = random.Random(0)
    shared = [words(rng, 1500) for _ in range(8)]
    return [run.ask(shared[i % 8] + words(rng, 700)) for i in range(64)]


@pytest.mark.parametrize(("plugin", "served"), [(None, 0), ({}, 0), (POOL, 48)])
def test_under_pressure_a_shared_prefix_is_reused_from_checkpoints_only(model, plugin, served):
    """Blocks of 528 tokens, 60 of them: a group's states are gone before its next prompt comes.

    1,500 shared tokens are 2 full blocks: with checkpoints 1,056 tokens are reused by every prompt
    of a group but the first, which computes them, and the second, which shows that they are shared.
    """
    reused = report(Run(model, blocks=60, block=528, plugin=plugin))
    assert set(reused) <= {0, 1056}
    assert reused.count(1056) == served


@pytest.mark.parametrize("plugin", [None, {}, {**POOL, "checkpoint_slots": 72}])
def test_with_room_for_every_state_the_prefix_is_reused_either_way(model, plugin):
    """With 200 blocks and 72 slots; a checkpoint is used, too, when its blocks are hit."""
    reused = report(Run(model, blocks=200, block=528, plugin=plugin))
    assert reused.count(1056) == 48


def test_an_interval_of_two_blocks_serves_all_but_the_first_prompt_of_a_group(model):
    plugin = {**POOL, "checkpoint_interval": 1056}
    reused = report(Run(model, blocks=200, block=528, plugin=plugin))
    assert reused.count(1056) == 56


def test_chunks_end_where_the_interval_wants_a_state(model):
    """300 tokens with states every 64: without the interval one chunk ends at the last block."""
    prompt = words(random.Random(0), 300)
    plain = Run(model, blocks=100, plugin={})
    plain.ask(prompt)
    assert plain.chunk_ends["r1"] == [288, 300]
    run = Run(model, blocks=100, plugin={"checkpoint_interval": 64})
    run.ask(prompt)
    assert run.chunk_ends["r1"] == [64, 128, 192, 256, 288, 300]
    assert run.ask(prompt[:200] + words(random.Random(1), 50)) == 192


def test_the_chunks_of_an_engine_are_not_those_of_the_one_before_it(model):
    """In one process: with an interval, without the plugin, and the first one again."""
    prompt = words(random.Random(0), 200)
    first = Run(model, blocks=100, plugin={"checkpoint_interval": 64})
    off = Run(model, blocks=100)
    coarse = Run(model, blocks=100, plugin={"checkpoint_interval": 128})
    for run in (first, off, coarse):
        run.ask(prompt)
    assert first.chunk_ends["r1"] == [64, 128, 192, 200]
    assert off.chunk_ends["r1"] == [192, 200]
    assert coarse.chunk_ends["r1"] == [128, 192, 200]


def pressed(run, prompt):
    """The prompt, and again when the blocks of its states are gone and those of its KV are not."""
    run.ask(prompt)
    without_states(run)
    return run.ask(prompt)


def test_kv_resident_and_states_gone_is_served_from_a_checkpoint(model):
    prompt = words(random.Random(0), 300)
    assert pressed(Run(model, blocks=100), prompt) == 0
    assert pressed(Run(model, blocks=100, plugin={}), prompt) == 0
    run = Run(model, blocks=100, plugin=POOL)
    assert pressed(run, prompt) == 288
    ((_, _, blocks, _),) = run.restores
    assert len(set(blocks)) == 3
    run.check()


@pytest.mark.parametrize(
    ("limit", "found"), [(None, 288), (299, 288), (287, 272), (100, 96), (9, 0)]
)
def test_a_restore_goes_no_further_than_the_limit_of_a_lookup(model, limit, found):
    """300 tokens in blocks of 16, a state after each: 18 * 16, 17 * 16, 6 * 16."""
    prompt = words(random.Random(0), 300)
    run = Run(model, blocks=100, plugin={**POOL, "checkpoint_interval": 16})
    run.ask(prompt)
    without_states(run)
    request = run.scheduler.requests[run.add(prompt)]
    look_up = run.scheduler.kv_cache_manager.get_computed_blocks
    limited = has(f"{MANAGER}:KVCacheManager.get_computed_blocks", "max_cache_hit_length")
    if limit is not None and not limited:
        with pytest.raises(TypeError):  # as without the plugin
            look_up(request, limit)
        return
    blocks, hit, resident = look_up(request, *([limit] if limited else []))
    assert (hit, resident) == (found, 0)
    assert [len(group) for group in blocks.blocks] == [found // 16] * 4
    planned = run.scheduler_side.lookup.planned.values()
    assert [copy.prefix.depth for copy in planned] == [found] * bool(found)


def test_a_restore_that_is_not_admitted_is_not_sent(model):
    """The looked-up request waits: every block but those of its prefix is in use."""
    prompt = words(random.Random(0), 300)
    run = Run(model, blocks=60, plugin=POOL)
    assert pressed(run, prompt) == 288
    run.restores.clear()
    filler = run.add(words(random.Random(1), 560), tokens=40)
    run.step()
    again = run.add(prompt)
    for _ in range(5):
        run.step()
        if again in run.cached:
            break
    sent = len(run.restores)
    assert sent == int(run.cached.get(again, 0) > 0)
    run.finish()
    assert filler in run.cached
    assert again in run.cached
    run.check()
    run.scheduler_side.checkpoints.check()


def test_the_retention_is_never_denser_than_the_users_own(model):
    def interval(own, **given):
        run = Run(model, blocks=40, plugin=given, prefix_cache_retention_interval=own)
        return run.config.cache_config.prefix_cache_retention_interval

    assert interval(0) == 0
    assert interval(0, checkpoint_interval=64) == 64
    assert interval(128, checkpoint_interval=64) == 128
    assert interval(64, checkpoint_interval=128) == 128
    assert interval(None, checkpoint_interval=64) == 64
    assert interval(0, **POOL) == 8192


def test_an_interval_that_is_no_multiple_of_the_block_stops(model):
    with pytest.raises(SystemExit, match="40 must be a multiple of the block size, 16 tokens") as e:
        Run(model, blocks=40, plugin={"checkpoint_interval": 40})
    assert "\n" not in str(e.value)


def test_a_wrong_interval_names_the_nearest_legal_ones(model):
    def line(interval, **shape):
        with pytest.raises(SystemExit) as stopped:
            Run(model, blocks=40, plugin={"checkpoint_interval": interval}, **shape)
        return str(stopped.value)

    assert line(40).endswith("a multiple of the block size, 16 tokens: 32 or 48")
    assert line(7).endswith("a multiple of the block size, 16 tokens: 16")
    # Blocks of 48 and 64 tokens end together every 192.
    shape = {"block": 48, "attention_block": 64, "hash_block": 16}
    assert line(480, **shape).endswith(
        "a multiple of what blocks of 48 and 64 tokens have in common, 192 tokens: 384 or 576"
    )


@pytest.mark.parametrize("interval", [None, 0])
def test_an_interval_that_no_prompt_reaches_is_none(model, caplog, interval):
    """Blocks of 1,040 and 1,072 tokens end together every 69,680; a prompt has 4,096 at most."""
    given = {} if interval is None else {"checkpoint_interval": interval}
    run = Run(
        model,
        blocks=40,
        plugin={"admission": "dense", **given},
        block=1040,
        attention_block=1072,
        hash_block=16,
    )
    assert run.scheduler_side.layout.interval == 0
    assert run.config.cache_config.prefix_cache_retention_interval == 0
    assert "1040 and 1072 tokens end together every 69680 tokens" in caplog.text
    assert run.ask(words(random.Random(0), 3000)) == 0


@pytest.mark.parametrize(("block", "level"), [(16, "INFO"), (512, "INFO"), (528, "WARNING")])
def test_the_smallest_prefix_is_said_and_warned_of_when_it_is_long(model, caplog, block, level):
    with caplog.at_level("INFO", logger="statecache"):
        Run(model, blocks=40, block=block, plugin={})
    said = {
        record.levelname
        for record in caplog.records
        if "smallest prefix that can be" in record.message
    }
    assert said == {level}
    assert f"smallest prefix that can be reused is {block} tokens" in caplog.text


def test_a_pool_that_does_not_fit_stops_with_the_numbers(model):
    """A tenth of the memory of blocks and checkpoints does not hold one state."""
    with pytest.raises(SystemExit, match=r"one native checkpoint of [\d,]+ bytes does not fit"):
        Run(model, blocks=20, plugin={"checkpoints": "native"})


def test_a_request_aborted_in_a_step_leaves_its_stored_state(model):
    """The workers store it all the same: the next request with this prompt resumes from it."""
    prompt = words(random.Random(0), 300)
    run = Run(model, blocks=100, plugin=POOL)
    name = run.add(prompt)
    planned = run.schedule()
    assert len(planned.kv_connector_metadata.stores) == 1
    run.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
    run.report(planned)
    run.finish()
    assert run.pool.get_num_free_blocks() == 99
    run.scheduler_side.checkpoints.check()
    assert run.scheduler_side.stores.requests == run.scheduler_side.lookup._hit == {}
    without_states(run)
    assert run.ask(prompt) == 288


def test_a_request_aborted_before_its_restore_sends_none(model):
    prompt = words(random.Random(0), 300)
    run = Run(model, blocks=100, plugin=POOL)
    run.ask(prompt)
    without_states(run)
    request = run.scheduler.requests[run.add(prompt)]
    assert run.scheduler.kv_cache_manager.get_computed_blocks(request)[1] == 288
    assert len(run.scheduler_side.lookup.planned) == 1
    run.scheduler.finish_requests([request.request_id], RequestStatus.FINISHED_ABORTED)
    assert run.scheduler_side.lookup.planned == {}
    run.step()
    assert run.restores == []
    run.check()


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_preempted_request_resumes_from_its_own_state(model, plugin):
    """40 blocks for 8 requests of 100 and more tokens: some are preempted, and come back."""
    run = Run(model, blocks=40, plugin=PLUGINS[plugin])
    preempted = []
    original = run.scheduler._preempt_request

    def preempt(request, *args, **more):
        preempted.append(request.request_id)
        return original(request, *args, **more)

    run.scheduler._preempt_request = preempt
    rng = random.Random(0)
    for _ in range(8):
        run.add(words(rng, 100), tokens=60)
    while run.scheduler.has_unfinished_requests():
        run.step()
        run.check()
    assert len(preempted) > 2
    assert run.shadow.resumed > 0
    assert run.scheduler_side.faults.anomalies == 0
    assert run.pool.get_num_free_blocks() == 39


@pytest.mark.parametrize("order", ["stock", "reuse"])
def test_a_reset_in_the_middle_of_a_step_leaves_no_state(model, order):
    """A weight update: what the workers report afterwards was computed with the old weights."""
    prompt = words(random.Random(0), 300)
    run = Run(model, blocks=100, plugin={**POOL, "block_policy": order})
    run.add(prompt)
    planned = run.schedule()
    assert len(planned.kv_connector_metadata.stores) == 1
    assert not run.scheduler.reset_prefix_cache()  # blocks are in use: vLLM refuses
    assert run.scheduler.reset_prefix_cache(reset_running_requests=True)
    run.report(planned)
    assert len(run.scheduler_side.checkpoints) == 0
    run.scheduler_side.checkpoints.check()
    run.finish()
    assert run.shadow.resumed == 0
    assert len(run.scheduler_side.checkpoints) == 1  # computed again, with the new weights
    run.check()
