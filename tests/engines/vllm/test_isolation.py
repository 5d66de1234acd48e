"""Requests that differ only in cache salt, LoRA or multimodal input never share a state.

On the real scheduler and cache manager, with real requests. `Shadow` knows for each request by
which hash its state must be known, and what every block and slot holds.
"""

import random

import pytest
from scheduled import Run, without_states, words
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

POOL = {"checkpoints": "native", "checkpoint_slots": 64}
PLUGINS = {
    **{order: {"block_policy": order} for order in ("stock", "reuse")},
    "reuse and pool": POOL,
    "stock and pool": {**POOL, "block_policy": "stock"},
}


def lora(name, path):
    return {"lora_request": LoRARequest(name, 1, path)}


def image(identifier):
    place = PlaceholderRange(offset=4, length=20)
    return {"mm_features": [MultiModalFeatureSpec(None, "image", identifier, place)]}


PAIRS = {
    "salt": ({"cache_salt": "a"}, {"cache_salt": "b"}),
    "salt and none": ({"cache_salt": "a"}, {}),
    "LoRA": (lora("a", "/a"), lora("b", "/a")),
    "LoRA path": (lora("a", "/a"), lora("a", "/b")),
    "LoRA and none": (lora("a", "/a"), {}),
    "image": (image("cat"), image("dog")),
    "image and none": (image("cat"), {}),
}


def new_run(model, plugin, blocks=100):
    run = Run(model, blocks=blocks, plugin=PLUGINS[plugin])
    # The model of this scheduler takes text only: let it take images.
    run.scheduler.max_num_encoder_input_tokens = 1000
    run.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=1000)
    return run


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("plugin", PLUGINS)
def test_two_of_a_pair_share_nothing(model, plugin, pair):
    """300 tokens: 288 are reused by the same request, none by the other one."""
    first, other = PAIRS[pair]
    prompt = words(random.Random(0), 300)
    run = new_run(model, plugin)
    assert [run.ask(prompt, **first) for _ in range(2)] == [0, 288]
    assert [run.ask(prompt, **other) for _ in range(2)] == [0, 288]
    if "pool" in plugin:
        assert len(run.scheduler_side.checkpoints) == 2
        without_states(run)
        assert [run.ask(prompt, **each) for each in (other, first)] == [288, 288]
        assert len({copy.slot for copy in run.restores}) == len(run.restores) == 2
        run.scheduler_side.checkpoints.check()
    run.check()


@pytest.mark.parametrize("pair", PAIRS)
def test_a_checkpoint_of_one_never_serves_the_other(model, pair):
    """The KV of both is there, the checkpoint only of one: the other one computes everything."""
    first, other = PAIRS[pair]
    prompt = words(random.Random(0), 300)
    run = new_run(model, "reuse and pool")
    run.ask(prompt, **other)
    run.scheduler_side.forget()
    run.ask(prompt, **first)
    without_states(run)
    assert run.ask(prompt, **other) == 0
    without_states(run)
    assert run.ask(prompt, **first) == 288


@pytest.mark.parametrize("plugin", PLUGINS)
def test_many_at_once_under_pressure(model, plugin):
    """The same few prompts under every salt, adapter and image, with too few blocks for all."""
    run = new_run(model, plugin, blocks=60)
    rng = random.Random(0)
    kinds = [each for pair in PAIRS.values() for each in pair]
    prompts = [words(rng, 150) for _ in range(2)]
    for _ in range(150):
        run.add(rng.choice(prompts)[: rng.randrange(100, 150)], tokens=4, **rng.choice(kinds))
        run.step()
        if rng.random() < 0.1:
            without_states(run)
    run.finish()
    run.check()
    assert run.shadow.resumed > 20
