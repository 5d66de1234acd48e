"""Reported of other caches, tried on vLLM's real scheduler: how much is reused, and by whom.

`Shadow` checks in each of them that a request resumes from its own state.
"""

import random

import pytest
from scheduled import GROUPS, Run, without_states, words
from test_isolation import new_run
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from statecache.index.keyed_index import key_of
from statecache.trace.recorder import BlockIds
from statecache_vllm import recording

POOL = {"checkpoints": "native", "checkpoint_slots": 64}
POOLS = {
    "reuse": {},
    "native": POOL,
    "int8": {**POOL, "checkpoints": "int8"},
    "stock and lru": {**POOL, "block_policy": "stock", "policy": "lru"},
    "learned": {**POOL, "policy": "learned"},
}


def every_block(plugin, block):
    """The settings with a state at the end of each block."""
    return {**plugin, "checkpoint_interval": block}


# How far: block boundaries.


@pytest.mark.parametrize("plugin", POOLS)
@pytest.mark.parametrize("block", [16, 32, 48])
def test_a_longer_prompt_of_a_stream_loses_less_than_a_block_and_is_monotone(model, plugin, block):
    """After n tokens, n + 1 to n + block of the same stream: the states that were kept serve them.

    n around each of the first multiples. A state is there where the last whole block of the first
    prompt ends; a prompt that ends with its block has one at its very end.
    """
    rng = random.Random(block)
    ours = Run(model, blocks=400, block=block, plugin=every_block(POOLS[plugin], block))
    stock = Run(model, blocks=400, block=block)
    for multiple in (1, 3):
        for n in (multiple * block - 1, multiple * block, multiple * block + 1):
            before = 0
            for more in (1, 2, block - 1, block):
                stream = words(rng, n + more)
                for run in (ours, stock):
                    assert run.ask(stream[:n]) == 0
                hit = ours.ask(stream)
                assert hit == n // block * block
                assert hit >= (n + more - 1) // block * block - block
                assert hit >= stock.ask(stream)
                assert hit >= before
                before = hit
    ours.check()


@pytest.mark.parametrize("states", ["in blocks", "in slots"])
@pytest.mark.parametrize(
    ("block", "turn"), [(2048, 535), (2048, 2047), (2048, 2048), (528, 535), (512, 100)]
)
def test_short_turns_lose_less_than_a_block_and_the_turn(model, block, turn, states):
    """Each turn resumes where the last whole block of the one before it ended.

    Nothing is kept inside a block, so that much is computed again: the turn, and what stood behind
    the last block.
    """
    run = Run(model, blocks=200, block=block, length=8192, plugin=POOL)
    stream = words(random.Random(turn), 8_000)
    before = 0
    for length in range(700, 8_000, turn):
        hit = run.ask(stream[:length])
        assert hit == before // block * block
        assert length - hit < block + max(turn, 700)
        before = length
        if states == "in slots":
            without_states(run)
    assert hit > 0
    run.check()


@pytest.mark.parametrize("cut", [3, 10, 400])
@pytest.mark.parametrize("plugin", ["native", "learned"])
def test_a_template_that_rewrites_the_end_of_a_turn(model, plugin, cut):
    """Turn n + 1 is turn n less its last tokens and 535 more, a state every 512.

    It resumes at the last multiple of 512 that both have, or later.
    """
    plugin_of = {**POOLS[plugin], "checkpoint_interval": 512}
    run = Run(model, blocks=1600, length=8192, plugin=plugin_of)
    rng = random.Random(cut)
    tokens = words(rng, 2000)
    run.ask(tokens)
    for _ in range(8):
        common = len(tokens) - cut
        tokens = [*tokens[:common], *words(rng, 535)]
        without_states(run)
        assert common // 512 * 512 <= run.ask(tokens) <= common
    run.check()


def test_siblings_of_a_long_head_that_come_one_after_another(model, monkeypatch):
    """16,000 tokens in blocks of 512, a state every 8,192: the first sibling leaves one at 8,192.

    The second parts from it at 16,000 and leaves a state at 15,872, the last block before that.
    """
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    run = Run(model, blocks=600, block=512, length=24_000, plugin=POOL)
    rng = random.Random(9)
    head = words(rng, 16_000)
    hits = []
    for tail in (4_000, 900, 700, 64, 2_500, 100, 3_000, 512):
        hits.append(run.ask([*head, *words(rng, tail)]))
        without_states(run)
    assert hits == [0, 8_192, *[15_872] * 6]
    run.check()


def test_a_prompt_that_grows_is_restored_once_a_turn_at_another_depth_each_time(model):
    """Six turns of 40 tokens from 100 on, in blocks of 16: at 96, 128, 176, 208, 256."""
    run = Run(model, blocks=200, plugin=every_block(POOL, 16))
    stream = words(random.Random(2), 400)
    hits = []
    for turn in range(6):
        hits.append(run.ask(stream[: 100 + 40 * turn]))
        without_states(run)
    assert hits == [0, 96, 128, 176, 208, 256]
    assert [copy.prefix.depth for copy in run.restores] == hits[1:]
    run.check()


# How far: what is still there.


def drop(run, hashes, states, kv):
    """Drop the states and the KV of blocks by number; states are in blocks or in slots."""
    pool, checkpoints = run.pool, run.scheduler_side.checkpoints
    for at in states:
        blocks = pool.get_cached_block(hashes[at], list(range(GROUPS)))
        pool.evict_blocks({block.block_id for block in blocks or ()})
        if checkpoints is not None and (state := checkpoints.tree.find(hashes[at])) is not None:
            checkpoints._drop(state)
    for at in kv:
        pool.evict_blocks({block.block_id for block in pool.get_cached_block(hashes[at], [GROUPS])})


@pytest.mark.parametrize(
    "kept", ["in blocks", "in slots", "in slots, int8", "every other in slots"]
)
def test_any_pattern_of_states_and_kv_at_four_places(model, share, kept):
    """All 256: a hit ends at the deepest state that has all KV below it, and nothing breaks."""
    plugin = {"in blocks": {}, "in slots, int8": POOLS["int8"]}.get(kept, POOL)
    run = Run(model, blocks=140, plugin=every_block(plugin, 16))
    rng = random.Random(0)
    for pattern in random.Random(1).sample(range(256), int(256 * share)):
        there = [bool(pattern >> bit & 1) for bit in range(8)]
        states, kv = there[:4], there[4:]
        prompt = words(rng, 65)
        name = run.add(prompt)
        hashes = run.scheduler.requests[name].block_hashes
        run.finish()
        if kept.startswith("in slots"):
            without_states(run)
        elif kept == "every other in slots":
            for at in (1, 3):
                blocks = run.pool.get_cached_block(hashes[at], list(range(GROUPS)))
                run.pool.evict_blocks({block.block_id for block in blocks or ()})
        gone = [[at for at in range(4) if not each[at]] for each in (states, kv)]
        drop(run, hashes, *gone)
        right = max((at + 1 for at in range(4) if states[at] and all(kv[: at + 1])), default=0)
        assert run.ask(prompt) == 16 * right
        run.check()
        assert run.scheduler_side.faults.anomalies == 0


# How far: images.


def with_images(*images):
    """Images as (first token, tokens, identity)."""
    return {
        "mm_features": [
            MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset=at, length=length))
            for at, length, name in images
        ]
    }


@pytest.mark.parametrize("plugin", POOLS)
@pytest.mark.parametrize("at", [15, 16, 17, 32, 63, 100])
@pytest.mark.parametrize("length", [1, 16, 40])
def test_another_image_ends_a_prefix_where_its_placeholders_begin(model, plugin, at, length):
    """The tokens are the same: the blocks before the one in which the image begins are reused."""
    run = taking_images(model, every_block(POOLS[plugin], 16))
    prompt = words(random.Random(at), 150)
    same = (3, 10, "both")
    cat, dog = (with_images(same, (at, length, name)) for name in ("cat", "dog"))
    assert [run.ask(prompt, **cat) for _ in range(2)] == [0, 144]
    for hit in (at // 16 * 16, 144):
        if plugin != "reuse":
            without_states(run)
        assert run.ask(prompt, **dog) == hit
        assert run.ask(prompt, **cat) == 144
    run.check()


def taking_images(model, plugin):
    run = Run(model, blocks=300, plugin=plugin)
    like = new_run(model, "reuse").scheduler
    run.scheduler.max_num_encoder_input_tokens = like.max_num_encoder_input_tokens
    run.scheduler.encoder_cache_manager = like.encoder_cache_manager
    return run


@pytest.mark.parametrize("plugin", POOLS)
def test_a_chat_with_one_more_image_each_turn_goes_on_from_the_turn_before(model, plugin):
    """Then once more with another third image: that turn shares the blocks before it alone."""
    run = taking_images(model, every_block(POOLS[plugin], 16))
    prompt = words(random.Random(0), 400)
    places = [(at, 30) for at in (5, 70, 128, 201, 290)]
    for third, hits in (("c", [0, 64, 128, 192, 256]), ("other", [64, 128, 128, 192, 256])):
        names = ["a", "b", third, "d", "e"]
        found = []
        for turn, length in enumerate((65, 129, 193, 257, 380), start=1):
            images = [(*place, name) for place, name in zip(places[:turn], names, strict=False)]
            inside = [image for image in images if image[0] + image[1] <= length]
            found.append(run.ask(prompt[:length], **with_images(*inside)))
            if plugin != "reuse":
                without_states(run)
        assert found == hits
    run.check()


# By whom: namespaces.

NAMESPACES = {
    "base": {},
    "salt X": {"cache_salt": "X"},
    "adapter X": {"lora_request": LoRARequest("X", 1, "X")},
    "adapter X, salt X": {"cache_salt": "X", "lora_request": LoRARequest("X", 1, "X")},
    "adapter X reloaded": {"lora_request": LoRARequest("X", 2, "X.2")},
}


@pytest.mark.parametrize("first", NAMESPACES)
@pytest.mark.parametrize("plugin", POOLS)
def test_namespaces_share_nothing(model, plugin, first):
    """One after another of the 25 pairs: hits, KV, states, their keys, recorded ids, points."""
    run = Run(model, blocks=700, plugin=POOLS[plugin])
    side, ids = run.scheduler_side, BlockIds(b"key")
    for number, second in enumerate(NAMESPACES):
        prompt = words(random.Random(number), 1_100)
        known, requests, points = [], [], [points_of(run)]
        for each in (first, second):
            name = run.add(prompt, **NAMESPACES[each])
            requests.append(run.scheduler.requests[name])
            looked_up = run.scheduler.kv_cache_manager.get_computed_blocks(requests[-1])
            run.finish()
            known.append((*looked_up[1:], run.cached[name]))
            points.append(points_of(run))
        assert known[0] == (0, 0, 0)
        paths = [side.layout.path(request, 1_100) for request in requests]
        keys = [set(map(key_of, path)) for path in paths]
        recorded = [ids.of(recording._ended(request)) for request in requests]
        if first == second:
            assert (known[1][0], known[1][2]) == (1_088, 1_088)
            assert (paths[0], recorded[0]) == (paths[1], recorded[1])
            assert points[1] == points[2]
        else:
            assert known[1] == (0, 0, 0)
            assert not keys[0] & keys[1]
            assert not set(recorded[0]) & set(recorded[1])
            assert points[2] - points[1] == points[1] - points[0]
        if side.checkpoints is not None:
            stored = [side.checkpoints.tree.find(path[-1]) for path in paths]
            assert None not in stored
            assert len(set(stored)) == 1 + (first != second)
            without_states(run)
            assert run.ask(prompt, **NAMESPACES[second]) == 1_088
    run.check()


def points_of(run):
    """How many places in prompts the policy `learned` knows."""
    checkpoints = run.scheduler_side.checkpoints
    return checkpoints.tree.sample().get("learned_points", 0) if checkpoints is not None else 0


# Queues.


@pytest.mark.parametrize("plugin", POOLS)
def test_equal_priorities_are_first_come_first_served(model, plugin):
    """The same arrivals under both policies of vLLM's queue: each request has the same hit."""
    found = []
    for policy in ("fcfs", "priority"):
        plugin_of = {**POOLS[plugin], "checkpoint_interval": 32}
        run = Run(model, blocks=90, plugin=plugin_of, requests=4, scheduling_policy=policy)
        rng = random.Random(4)
        heads = [words(rng, 100) for _ in range(5)]
        waited = 0
        for _ in range(120):
            for _ in range(rng.randint(0, 2)):
                run.add(rng.choice(heads)[: rng.randint(20, 100)] + words(rng, rng.randint(1, 40)))
            run.step()
            waited += len(run.scheduler.waiting) > 0
        run.finish()
        assert waited > 10
        assert run.shadow.resumed > 20
        found.append((run.cached, run.chunk_ends))
    assert found[0] == found[1]
