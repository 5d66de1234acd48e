"""A state is named, stored and served only where a worker wrote it, on vLLM's real scheduler."""

import random

import pytest
from scheduled import Run, words
from vllm.v1.request import RequestStatus
from written import StateBlocks

from statecache_vllm.prefill_chunks import ChunkEnds

POOL = {"checkpoints": "native", "checkpoint_slots": 12}
# Tokens of a block, of its hashes, and of a chunk before a state inside it; None for no such state.
LAYERS = [(32, 8, 8), (32, 8, 1), (32, 8, None), (32, 32, None), (128, 16, 1), (128, 128, None)]


def traffic(run, blocks, seed, steps):
    """Prompts that part anywhere, some aborted, in a pool under pressure, budgets below a block."""
    rng, scale = random.Random(seed), run.block // 32
    prefixes = [words(rng, scale * rng.randint(40, 150)) for _ in range(3)]
    names = []
    for _ in range(steps):
        if rng.random() < 0.4 and len(run.scheduler.requests) < 6:
            whole = rng.choice(prefixes)
            most = rng.choice((scale * 48, len(whole)))
            prompt = whole[: rng.randint(4, most)] + words(rng, scale * rng.choice((1, 4, 30, 60)))
            if rng.random() < 0.2:
                prefixes[rng.randrange(len(prefixes))] = prompt[: scale * 200]
            names.append(run.add(prompt, tokens=rng.randint(1, 20)))
        if names and rng.random() < 0.03:
            name = names.pop(rng.randrange(len(names)))
            if name in run.scheduler.requests:
                run.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
        blocks.step()


def searched(model, layers, plugin, seeds, steps, **more):
    block, unit, alignment = layers
    total = [0, 0, 0, 0, 0]
    for seed in seeds:
        run = Run(
            model,
            blocks=(60, 120)[seed % 2],
            block=block,
            hash_block=unit,
            alignment=alignment,
            plugin=plugin,
            budget=(96, 200, 1024)[seed % 3],  # below a block of 128, too
            **more,
        )
        blocks = StateBlocks(run, alignment)
        traffic(run, blocks, seed, steps)
        found = (blocks.names, blocks.unwritten, blocks.stores, blocks.wrong_stores)
        for number, count in enumerate((*found, blocks.wrong_begins)):
            total[number] += count
        if plugin is not None:
            assert run.scheduler_side.faults.anomalies == 0
    return total


def junction_inside_a_block(model, plugin, alignment):
    """A state after 24 tokens, KV of 32, blocks of 32: a prompt of 73 goes on at 24."""
    rng = random.Random(0)
    run = Run(model, blocks=60, block=32, hash_block=8, alignment=alignment, plugin=plugin)
    blocks = StateBlocks(run, alignment)
    run.step = blocks.step
    shared = words(rng, 32)
    run.ask(shared[:25])
    run.ask([*shared, *words(rng, 40)])
    assert run.ask([*shared, *words(rng, 41)]) == 24
    found = blocks.unwritten
    resumed = run.ask([*shared, *words(rng, 42)])
    return found, resumed, blocks


@pytest.mark.parametrize("alignment", [1, 8])
def test_without_the_plugin_a_state_after_24_tokens_is_named_for_32(model, alignment):
    """What the plugin is for: this can go when vLLM ends the chunk at 32 or does not name it."""
    found, resumed, blocks = junction_inside_a_block(model, None, alignment)
    assert (found, resumed) == (3, 32)
    assert blocks.wrong_begins == 3


@pytest.mark.parametrize("alignment", [1, 8, None])
@pytest.mark.parametrize("plugin", [{}, {"block_policy": "stock"}, POOL])
def test_a_prompt_that_resumes_inside_a_block_ends_a_chunk_at_its_end(model, plugin, alignment):
    found, resumed, blocks = junction_inside_a_block(model, plugin, alignment)
    assert (found, resumed) == (0, 32)
    assert (blocks.wrong_begins, blocks.wrong_stores) == (0, 0)
    if plugin is POOL:
        assert blocks.stores > 0


@pytest.mark.parametrize("alignment", [1, 8])
def test_an_unwritten_state_is_not_stored_even_where_chunks_are_not_ended(
    model, alignment, monkeypatch
):
    """As where another plugin takes the place of the chunk ends: it loses its name, too."""
    monkeypatch.setattr(ChunkEnds, "end", lambda _self, _request, _start, _asked, tokens: tokens)
    found, resumed, blocks = junction_inside_a_block(model, POOL, alignment)
    assert (found, resumed) == (0, 24)
    assert (blocks.wrong_begins, blocks.wrong_stores) == (0, 0)


@pytest.mark.parametrize("layers", LAYERS)
def test_no_name_and_no_slot_for_a_state_that_nobody_wrote(model, layers, share):
    for plugin in (
        {},
        {**POOL, "checkpoint_interval": 2 * layers[0]},
        {**POOL, "admission": "branch-points"},
    ):
        seeds = range(max(2, int(6 * share)))
        names, unwritten, stores, wrong_stores, wrong_begins = searched(
            model, layers, plugin, seeds, 400
        )
        assert names > 100
        assert (stores > 20) is (plugin != {})
        assert (unwritten, wrong_stores, wrong_begins) == (0, 0, 0)
