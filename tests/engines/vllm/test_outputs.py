"""Tokens of real models: the same with the plugin off and on, one request at a time."""

import pytest
from engine import cached, document, run, texts

# Each prompt of 4 full blocks of 32 tokens is asked cold, again, and after others had its blocks;
# the last one grows past a chunk of 256 tokens.
PROMPTS = [document(i, 148) for i in (1, 1, 2, 3, 1)]
GROWING = [document(9, 148), document(9, 300)]
ROOM = {"blocks": 26, "max_model_len": 384}
PLUGINS = {
    "reuse": {},
    "stock": {"block_order": "stock"},
    "gds": {"block_order": "gds"},
    "native, chunks of 64": {
        "checkpoints": "native",
        "checkpoint_slots": 8,
        "checkpoint_interval": 64,
    },
}


@pytest.fixture(scope="module")
def off(model):
    with run(model, **ROOM) as engine:
        return engine.ask(PROMPTS) + engine.ask(GROWING)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_every_token_is_the_same_with_the_plugin(model, off, plugin):
    """Cold, warm, evicted, restored and in chunks, under pressure of 26 blocks."""
    with run(model, **ROOM, plugin=PLUGINS[plugin]) as engine:
        on = engine.ask(PROMPTS) + engine.ask(GROWING)
        assert texts(on) == texts(off)
        assert sum(cached(on)) > 0
        if "native" in plugin:
            engine.planner.book.check()
        assert engine.pool.get_num_free_blocks() == 25


def test_int8_checkpoints_change_few_outputs(model):
    """100 prompts restored from int8, 4 tokens each; a random model flips ties easily."""
    plugin = {"int8": True, "int8_slots": 100, "block_order": "stock"}
    prompts = [document(i, 36) for i in range(100)]
    with run(model, blocks=1000, max_model_len=64, plugin=plugin) as engine:
        cold = engine.ask(prompts, tokens=4)
        assert len(engine.planner.book) == 100
        states = set(engine.planner._states)
        engine.pool.evict_blocks(
            {
                block.block_id
                for block in engine.pool.blocks
                if block.block_hash and int.from_bytes(block.block_hash[-4:], "big") in states
            }
        )
        warm = engine.ask(prompts, tokens=4)
        assert cached(warm) == [32] * 100
        assert engine.planner.book.counts.restored == 100
    same = sum(a == b for a, b in zip(texts(cold), texts(warm), strict=True))
    first = sum(a[0] == b[0] for a, b in zip(texts(cold), texts(warm), strict=True))
    print(f"int8: {same} of 100 outputs of 4 tokens the same, {first} first tokens")
    assert same >= 60
    assert first >= 90
