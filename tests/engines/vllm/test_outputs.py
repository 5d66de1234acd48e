"""Tokens of real models: the same with the plugin off and on, one request at a time."""

import pytest
from engine import cached, document, run, texts
from tiny_models import make_tiny_model

# Each prompt of 4 full blocks of 32 tokens is asked cold, again, and after others had its blocks;
# the last one grows past a chunk of 256 tokens.
PROMPTS = [document(i, 148) for i in (1, 1, 2, 3, 1)]
GROWING = [document(9, 148), document(9, 300)]
ROOM = {"blocks": 26, "max_model_len": 384}
PLUGINS = {
    "reuse": {},
    "stock": {"block_policy": "stock"},
    "native, chunks of 64": {
        "checkpoints": "native",
        "checkpoint_slots": 8,
        "checkpoint_interval": 64,
    },
    "native, in host memory": {
        "checkpoints": "native",
        "checkpoint_memory": "host:64MiB",
        "checkpoint_interval": 64,
    },
    "native, by learned at ends and forks": {
        "checkpoints": "native",
        "checkpoint_slots": 8,
        "policy": "learned",
        "admission": "branch-points",
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
            engine.scheduler_side.checkpoints.check()
        assert engine.pool.get_num_free_blocks() == 25


@pytest.mark.parametrize("plugin", ["reuse", "native, chunks of 64"])
def test_prompts_of_about_one_block(model, plugin):
    """Of 1 to 65 tokens, each asked twice: a state needs a whole block and a token after it.

    Tokens are vLLM's own; what is cached at the second asking is the prompt's whole blocks, less
    the one that ends with its last token, which has to be computed.
    """
    prompts = [document(40 + length, length) for length in (1, 2, 31, 32, 33, 64, 65)]
    with run(model, **ROOM) as engine:
        expected = texts(engine.ask(prompts))
    with run(model, **ROOM, plugin=PLUGINS[plugin]) as engine:
        cold, warm = engine.ask(prompts), engine.ask(prompts)
        assert texts(cold) == texts(warm) == expected
        assert cached(cold) == [0] * 7
        assert cached(warm) == [0, 0, 0, 0, 32, 32, 64]
        assert engine.scheduler_side.faults.anomalies == 0
        assert engine.pool.get_num_free_blocks() == 25


def test_engines_one_after_the_other_do_not_touch_each_other(model, off):
    """With a checkpoint pool, without the plugin, with another order: in one process."""
    for plugin in (PLUGINS["native, chunks of 64"], None, PLUGINS["stock"], None):
        with run(model, **ROOM, plugin=plugin) as engine:
            assert texts(engine.ask(PROMPTS[:3])) == texts(off[:3])
            if plugin is None:
                assert engine.scheduler.connector is None
                assert type(engine.pool.free_block_queue).__module__.startswith("vllm.")
                assert type(engine.pool.cached_block_hash_to_block).__module__.startswith("vllm.")
            else:
                assert engine.scheduler_side.faults.anomalies == 0


# The Mamba2 hybrid, in blocks of 256 tokens: cold, warm, after others had its blocks, and growing.
MAMBA2_PROMPTS = [document(i, 300) for i in (1, 1, 2, 3, 4, 1)]
MAMBA2_GROWING = [document(9, 300), document(9, 560)]
MAMBA2_ROOM = {"blocks": 16, "max_model_len": 768, "block_size": 256}


@pytest.fixture(scope="module")
def mamba2(tmp_path_factory):
    """The model, and what vLLM answers by itself."""
    folder = make_tiny_model("granite", tmp_path_factory.mktemp("granite"))
    with run(folder, **MAMBA2_ROOM) as engine:
        return folder, texts(engine.ask(MAMBA2_PROMPTS) + engine.ask(MAMBA2_GROWING))


@pytest.mark.parametrize(
    "plugin",
    [{}, {"checkpoints": "native", "checkpoint_slots": 8}],
    ids=["reuse", "native"],
)
def test_every_token_of_a_mamba2_hybrid_is_the_same_under_pressure(mamba2, plugin):
    """With 15 blocks for eight requests of 2 or 3 KV blocks and as many of states each."""
    model, expected = mamba2
    with run(model, **MAMBA2_ROOM, plugin=plugin) as engine:
        on = engine.ask(MAMBA2_PROMPTS) + engine.ask(MAMBA2_GROWING)
        assert texts(on) == expected
        assert cached(on)[1] == 256
        assert engine.scheduler_side.faults.anomalies == 0
        assert engine.pool.get_num_free_blocks() == 15
        if engine.scheduler_side.checkpoints is not None:
            engine.scheduler_side.checkpoints.check()
            assert cached(on)[-1] == 256
