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
