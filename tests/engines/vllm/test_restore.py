"""KV resident, state gone: served from the checkpoint pool, with the same tokens as without it."""

import pytest
from engine import BLOCK, cached, document, run, texts

SLOTS = {"checkpoints": "native", "checkpoint_slots": 16}
# Both are cut into chunks of 256 tokens; the longer prompt shares the first one and no more.
SHORT = document(1, 276)
LONG = [*SHORT, *document(2, 256)]


def drop_state_blocks(engine):
    """Give every free block of a recurrent group away, as pressure does, and no KV."""
    states = (
        set(engine.scheduler_side.layout.state_groups) if engine.scheduler.connector else {0, 1, 2}
    )
    pool = engine.pool
    mine = [
        block.block_id
        for block in pool.blocks
        if block.block_hash is not None
        and block.ref_cnt == 0
        and int.from_bytes(block.block_hash[-4:], "big") in states
    ]
    pool.evict_blocks(set(mine))
    return len(mine)


@pytest.fixture(scope="module")
def expected(any_model):
    """Stock vLLM: what comes out, cold; and that without states nothing is reused."""
    model, block = any_model
    with run(model, block_size=block) as engine:
        cold = engine.ask([SHORT, LONG])
        assert drop_state_blocks(engine) > 0
        again = engine.ask([SHORT])
        assert cached(again) == [0]
        return texts(cold)


WAYS = {
    "reuse": {},
    "stock": {"block_policy": "stock"},
    "host": {"checkpoint_memory": "host"},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_prompt_whose_states_are_gone_is_served_from_the_checkpoints(any_model, expected, way):
    """Of 276 and 532 tokens, 256 are restored.

    vLLM hashes the restored blocks again, so that the longer prompt needs no restore of its own.
    """
    model, block = any_model
    with run(model, block_size=block, plugin={**SLOTS, **WAYS[way]}) as engine:
        cold = engine.ask([SHORT])
        assert cached(cold) == [0]
        assert drop_state_blocks(engine) > 0
        again = engine.ask([SHORT, LONG])
        assert cached(again) == [256, 256]
        assert texts(cold) + texts(again) == [expected[0], *expected]
        assert engine.scheduler_side.checkpoints.counts.restored == 1
        engine.scheduler_side.checkpoints.check()


def test_two_salts_never_share_a_state(model):
    with run(model, plugin=SLOTS) as engine:
        engine.ask([document(1)], salt="a")
        drop_state_blocks(engine)
        assert cached(engine.ask([document(1)], salt="b")) == [0]
        assert cached(engine.ask([document(1)], salt="a")) == [12 * BLOCK]


def test_after_a_reset_no_checkpoint_is_left(model):
    with run(model, plugin=SLOTS) as engine:
        engine.ask([document(1), document(2)])
        assert len(engine.scheduler_side.checkpoints) > 0
        assert engine.llm.reset_prefix_cache()
        assert len(engine.scheduler_side.checkpoints) == 0
        assert cached(engine.ask([document(1)])) == [0]
        engine.scheduler_side.checkpoints.check()


def test_an_interval_is_checked_against_the_block_vllm_settles_on(model):
    """A state in float32 takes 68,608 bytes, 32 tokens of KV 65,536: vLLM makes blocks of 64."""
    large = {"mamba_ssm_cache_dtype": "float32", "block_size": 32}
    with pytest.raises(SystemExit, match="96 must be a multiple of the block size, 64 tokens"):
        run(model, plugin={"checkpoint_interval": 96}, **large).__enter__()
    with run(model, plugin={**SLOTS, "checkpoint_interval": 128}, **large) as engine:
        answers = engine.ask([document(1, 300), document(1, 300)[:200]])
        assert cached(answers) == [0, 128]
