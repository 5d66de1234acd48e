"""An error inside the plugin: counted, logged once, and vLLM goes on by itself.

Errors are planted in the plugin's own parts, before or after they did their work, under the real
scheduler and cache manager. `Shadow` checks that every request resumes from its own state.
"""

import itertools

import pytest
from engine import document, run, texts
from scheduled import Run, traffic, without_states
from test_restore import drop_state_blocks
from vllm.v1.core.block_pool import BlockHashToBlockMap
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

from statecache._blocks import BlockHashIndex, BlockQueue, FifoQueue, ReuseQueue
from statecache.checkpoint.pool import CheckpointPool
from statecache.checkpoint.proof import Prefix
from statecache_vllm import seams
from statecache_vllm.block_queues import ProtectedRequests, give_back_map
from statecache_vllm.checkpoints import CheckpointCopy, CheckpointManager
from statecache_vllm.state_tree import StateTree
from statecache_vllm.worker_side import CheckpointStore

POOL = {"checkpoints": "native", "checkpoint_slots": 16}
CHECKPOINT_CALLS = ("prepare_store", "complete_store", "lookup", "restored", "drop_below")
QUEUES = {"reuse": ReuseQueue, "stock": FifoQueue}


def plant(monkeypatch, owner, name, at, *, after=False):
    """From call number `at` on `owner.name` fails, before or after it did its work."""
    original, calls = getattr(owner, name), itertools.count(1)

    def failing(*args, **kwargs):
        bad = next(calls) >= at
        if bad and not after:
            raise KeyError("planted")
        done = original(*args, **kwargs)
        if bad:
            raise KeyError("planted")
        return done

    monkeypatch.setattr(owner, name, failing)


def errors(caplog):
    return [record for record in caplog.records if record.levelname == "ERROR"]


def drive(run, caplog):
    """300 steps under pressure; no block is lost, all requests end, one line was logged."""
    for _ in traffic(run, 1, 300):
        run.check()
    assert run.pool.get_num_free_blocks() == len(run.pool.blocks) - 1
    assert run.shadow.resumed > 0
    assert run.scheduler_side.faults.anomalies == 1
    (line,) = errors(caplog)
    assert "vLLM goes on by itself" in line.message
    assert "planted" in line.exc_text


@pytest.mark.parametrize(
    ("name", "after"),
    [
        *itertools.product(("popleft_n", "append_n", "prepend_n", "unhashed"), (False, True)),
        ("touch", False),  # what has counted uses must not be done again
    ],
)
@pytest.mark.parametrize("order", QUEUES)
def test_a_queue_that_fails_is_replaced_by_vllms_own(
    monkeypatch, caplog, model, order, name, after
):
    owner = QUEUES[order] if name in vars(QUEUES[order]) else BlockQueue
    plant(monkeypatch, owner, name, 40 if name != "unhashed" else 2, after=after)
    pool = POOL if order == "stock" else {}  # alone it is vLLM's own queue
    vllm_run = Run(model, blocks=70, plugin={**pool, "block_policy": order})
    drive(vllm_run, caplog)
    assert vllm_run.scheduler_side.queue is None
    assert isinstance(vllm_run.pool.free_block_queue, FreeKVCacheBlockQueue)
    assert vllm_run.scheduler.kv_cache_manager.reset_prefix_cache()
    vllm_run.check()


def test_a_hit_that_fails_in_the_middle_is_counted_once(model):
    """Block 5 is free and 6 in use, as often as the plugin can count: vLLM's own goes on."""
    vllm_run = Run(model, blocks=40, plugin={})
    free, used, null = vllm_run.pool.blocks[5], vllm_run.pool.blocks[6], vllm_run.pool.null_block
    nulls = null.ref_cnt
    vllm_run.pool.touch([used])
    used.ref_cnt = 2**63 - 1
    vllm_run.pool.touch([free, null, used, free])
    assert (free.ref_cnt, used.ref_cnt, null.ref_cnt) == (2, 2**63, nulls + 1)
    assert vllm_run.scheduler_side.faults.anomalies == 1
    assert isinstance(vllm_run.pool.free_block_queue, FreeKVCacheBlockQueue)
    vllm_run.pool.touch([free])
    assert free.ref_cnt == 3
    listed = vllm_run.pool.free_block_queue.get_all_free_blocks()
    assert [block.block_id for block in listed] == [*range(1, 5), *range(7, 40)]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("name", ["get_one_block", "contain", "insert", "pop"])
@pytest.mark.parametrize("order", QUEUES)
def test_a_map_that_fails_is_replaced_by_vllms_own(monkeypatch, caplog, model, order, name, after):
    """It knows what the blocks say; the queue, which reads the map of the plugin, goes too."""
    plant(monkeypatch, BlockHashIndex, name, 40, after=after)
    vllm_run = Run(model, blocks=70, plugin={**POOL, "block_policy": order})
    drive(vllm_run, caplog)
    own = vllm_run.pool.cached_block_hash_to_block
    assert isinstance(own, BlockHashToBlockMap)
    keys = {b.block_hash for b in vllm_run.pool.blocks} - {None}
    assert len(own) == len(keys) > 0
    assert isinstance(vllm_run.pool.free_block_queue, FreeKVCacheBlockQueue)
    assert vllm_run.scheduler.kv_cache_manager.reset_prefix_cache()
    vllm_run.check()


def test_a_block_under_two_keys_is_under_both_in_vllms_own_map(model):
    """As a partial block that was completed: `cached_block_hashes_by_block` has the second one."""
    vllm_run = Run(model, blocks=70, plugin={"block_policy": "stock", **POOL})
    (block,) = vllm_run.pool.get_new_blocks(1)
    keys = [seams.key_of(name, 0) for name in (b"half", b"whole")]
    for key in keys:
        vllm_run.pool._insert_block_hash(key, block, num_tokens=16)
    own = give_back_map(vllm_run.pool)
    for key in keys:
        assert own.get_one_block(key) is block
    vllm_run.pool._insert_block_hash(keys[0], block, num_tokens=16)
    assert [own.pop(key, block.block_id) for key in keys] == [block, block]
    assert len(own) == 0


@pytest.mark.parametrize(
    ("owner", "name"), [(ReuseQueue, "looked_up"), (ProtectedRequests, "looked_up")]
)
def test_an_order_that_cannot_learn_is_replaced_by_vllms_own(
    monkeypatch, caplog, model, owner, name
):
    plant(monkeypatch, owner, name, 20)
    vllm_run = Run(model, blocks=70, plugin={})
    drive(vllm_run, caplog)
    assert isinstance(vllm_run.pool.free_block_queue, FreeKVCacheBlockQueue)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("order", ["reuse", "stock"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        *((CheckpointManager, name) for name in CHECKPOINT_CALLS),
        *((StateTree, name) for name in ("find", "put", "use", "pin", "unpin", "peek", "erase")),
    ],
)
def test_checkpoints_that_fail_are_dropped_and_the_block_policy_stays(
    monkeypatch, caplog, model, owner, name, order, after
):
    plant(monkeypatch, owner, name, 10, after=after)
    vllm_run = Run(model, blocks=70, plugin={**POOL, "block_policy": order})
    drive(vllm_run, caplog)
    assert vllm_run.scheduler_side.checkpoints is None
    assert isinstance(vllm_run.scheduler_side.queue, QUEUES[order])
    keys = {block.block_hash for block in vllm_run.pool.blocks} - {None}
    assert not any(vllm_run.scheduler_side.parts.block_index.has_checkpoint(key) for key in keys)


def test_a_queue_that_fails_takes_the_checkpoints_with_it(monkeypatch, caplog, model):
    plant(monkeypatch, ReuseQueue, "popleft_n", 60)
    vllm_run = Run(model, blocks=70, plugin=POOL)
    drive(vllm_run, caplog)
    assert (vllm_run.scheduler_side.checkpoints, vllm_run.scheduler_side.queue) == (None, None)


@pytest.mark.parametrize(("owner", "name"), [(CheckpointManager, "clear"), (ReuseQueue, "reset")])
def test_what_fails_at_a_reset_leaves_nothing_behind(monkeypatch, caplog, model, owner, name):
    """A weight update must not meet an old state, whatever fails."""
    plant(monkeypatch, owner, name, 1)
    vllm_run = Run(model, blocks=70, plugin=POOL)
    prompt = document(1, 100)
    vllm_run.ask(prompt)
    assert vllm_run.scheduler.kv_cache_manager.reset_prefix_cache()
    assert (
        vllm_run.scheduler_side.checkpoints is None or len(vllm_run.scheduler_side.checkpoints) == 0
    )
    assert vllm_run.ask(prompt) == 0
    vllm_run.check()
    assert (vllm_run.scheduler_side.faults.anomalies, len(errors(caplog))) == (1, 1)


def test_chunks_end_as_vllms_own_when_the_interval_fails(monkeypatch, caplog, model):
    monkeypatch.setattr("statecache_vllm.prefill_chunks.clip", None)
    vllm_run = Run(model, blocks=100, plugin={"checkpoint_interval": 64})
    vllm_run.ask(document(1, 300))
    assert vllm_run.chunk_ends["r1"] == [288, 300]
    assert len(errors(caplog)) == 1


def test_a_promised_state_that_vllm_did_not_take_stops_the_step(model):
    """Nothing may go on from a block without its state: this one error is not swallowed."""
    vllm_run = Run(model, blocks=100, plugin=POOL)
    prompt = document(1, 300)
    vllm_run.ask(prompt)
    vllm_run.pool.evict_blocks({b.block_id for b in vllm_run.pool.blocks if b.block_hash})
    vllm_run.add(prompt)
    vllm_run.scheduler_side.lookup.planned = _AlwaysPlanned()
    with pytest.raises(RuntimeError, match="did not take the block of a restored state"):
        vllm_run.step()


class _AlwaysPlanned(dict):
    """As if a restore into blocks 97, 98 and 99 had been planned for every request."""

    def pop(self, *_):
        return CheckpointCopy(0, 0, (97, 98, 99), Prefix(0, 288))


def test_a_restore_that_is_not_sent_would_be_seen(monkeypatch, model):
    """What the tests above rely on: the shadow worker finds a block without its state."""
    vllm_run = Run(model, blocks=100, plugin=POOL)
    prompt = document(1, 300)
    vllm_run.ask(prompt)
    without_states(vllm_run)
    monkeypatch.setattr(vllm_run.scheduler_side, "plan", lambda _: ([], []))
    with pytest.raises(AssertionError):
        vllm_run.ask(prompt)


# The same on a real model: what comes out is what vLLM without the plugin says.

PROMPTS = [document(i, 148) for i in (1, 1, 2, 3, 1)]
ROOM = {"blocks": 26, "max_model_len": 384}


@pytest.fixture(scope="module")
def off(model):
    with run(model, **ROOM) as engine:
        return texts(engine.ask(PROMPTS))


@pytest.mark.parametrize(
    ("mode", "owner", "name", "at"),
    [
        ("native", ReuseQueue, "popleft_n", 12),
        ("native", ReuseQueue, "append_n", 6),
        ("native", CheckpointManager, "lookup", 1),
        ("native", CheckpointManager, "restored", 1),
        ("native", CheckpointManager, "prepare_store", 3),
        ("native", CheckpointStore, "store", 2),
        ("native", CheckpointStore, "report", 3),
        ("int8", CheckpointPool, "store", 1),  # of the first prompt: no state was ever rounded
        ("int8", CheckpointStore, "store", 1),
        ("int8", CheckpointStore, "report", 1),
    ],
)
def test_an_error_changes_no_token(monkeypatch, caplog, model, off, mode, owner, name, at):
    plant(monkeypatch, owner, name, at)
    with run(model, **ROOM, plugin={**POOL, "checkpoints": mode}) as engine:
        said = texts(engine.ask(PROMPTS[:2]))
        drop_state_blocks(engine)
        said += texts(engine.ask(PROMPTS[2:]))
        again = texts(engine.ask(PROMPTS[:2]))
        assert (said, again) == (off, off[:2])
        assert engine.scheduler_side.faults.anomalies == 1
        assert engine.scheduler_side.checkpoints is None
        assert engine.pool.get_num_free_blocks() == 25
    assert len([record for record in errors(caplog) if "planted" in (record.exc_text or "")]) == 1


def test_a_restore_that_fails_stops_the_step(monkeypatch, model):
    plant(monkeypatch, CheckpointStore, "restore", 1)
    with run(model, plugin=POOL) as engine:
        engine.ask([document(1)])
        drop_state_blocks(engine)
        with pytest.raises(KeyError, match="planted"):
            engine.ask([document(1)])
