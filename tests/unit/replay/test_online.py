"""The replay that runs along says what `statecache replay` says of the same recording."""

import random

import pytest

from statecache import CostModel
from statecache.index.policies import ENGINE, policy_names
from statecache.replay.kv_residency import kv_timeline
from statecache.replay.online import ShadowReplay, _Tree
from statecache.replay.prefix_tree import PrefixTree
from statecache.replay.schedule import make_schedule
from statecache.replay.state_slots import replay
from statecache.trace.format import Request, Trace
from statecache.trace.recorder import BlockIds, Ended
from support.recorded import EXCERPTS, tree_of

COST = CostModel()


def agents(seed: int, requests: int, most_blocks: int) -> list[list[int]]:
    """Conversations that grow, fork and come back, as chained ids; some end inside a chunk."""
    rng = random.Random(seed)
    ids = BlockIds(b"key")
    known = [[rng.randrange(1_000) for _ in range(1_024)] for _ in range(5)]
    prompts = []
    for _ in range(requests):
        tokens = rng.choice(known)
        if rng.random() < 0.3:
            tokens = tokens[: rng.randrange(1, len(tokens) + 1)]
        tokens = [*tokens, *[rng.randrange(1_000)] * rng.randrange(4_000)]
        tokens = tokens[: rng.randrange(600, most_blocks * 512)]
        known.append(tokens)
        if len(known) > 25:
            known.pop(rng.randrange(len(known)))
        prompts.append(ids.of(Ended(tokens, 1)))
    return prompts


def rows(prompts, slots, kv_tokens):
    requests = [Request(0, 512 * len(ids), 1, ids) for ids in prompts if ids]
    tree = PrefixTree.of(Trace("made here", "", None, requests))
    schedule = make_schedule(tree, kv_timeline(tree, kv_tokens), "dense")
    return {policy: replay(schedule, policy, slots, COST) for policy in policy_names(ENGINE)}


def shadow_of(prompts, slots, kv_tokens):
    shadow = ShadowReplay(slots, kv_tokens, COST)
    for ids in prompts:
        shadow.observe(ids, 0)
    return shadow


def assert_equal(sample, found):
    for policy, row in found.items():
        assert sample["dry_run_requests"] == row.requests
        assert sample["dry_run_rejected_requests"] == row.rejected
        assert sample["dry_run_prompt_tokens"] == row.prompt_tokens
        assert sample[f"dry_run_hit_tokens|{policy}"] == row.hit_tokens
        missed = sample[f"dry_run_missed_by_state_tokens|{policy}"]
        assert missed == row.missed_by_state_tokens
        assert sample[f"dry_run_evictions|{policy}"] == row.evicted_states


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("slots", "kv_blocks"), [(3, 60), (12, 100), (12, 400), (60, 20)])
def test_the_numbers_are_those_of_a_replay(seed, slots, kv_blocks):
    """Few slots, a KV pool that turns over, and prompts longer than it (20 blocks)."""
    prompts = agents(seed, 400, 45)
    sample = shadow_of(prompts, slots, kv_blocks * 512 + 100).sample()
    found = rows(prompts, slots, kv_blocks * 512 + 100)
    assert_equal(sample, found)
    assert (found["gds"].rejected > 0) == (kv_blocks == 20)
    assert found["lru"].evicted_states > 0 or slots == 60


def test_a_published_trace_too():
    """Its ids name whole prefixes."""
    prompts = tree_of("conversation", EXCERPTS).paths  # a node is a prefix
    kv_tokens = 2_500 * 512
    assert_equal(shadow_of(prompts, 128, kv_tokens).sample(), rows(prompts, 128, kv_tokens))


def test_worked_by_hand():
    """Two slots. ab, abc (hits ab), x, y: lru keeps x and y; the engine says what it reused.

    abc again has all KV resident: it could resume at 2 blocks, and there is no state (lru).
    """
    shadow = ShadowReplay(2, 100 * 512, COST)
    shadow.observe([1, 2], 0)
    shadow.observe([1, 2, 3], 1_100)  # two whole blocks
    shadow.observe([7], -1)
    shadow.observe([8], 0)
    shadow.observe([1, 2, 3], 0)
    shadow.observe([], 0)
    sample = shadow.sample()
    assert sample["dry_run_requests"] == 5
    assert sample["dry_run_prompt_tokens"] == 10 * 512
    assert sample["dry_run_hit_tokens|engine"] == 1_024
    assert sample["dry_run_hit_tokens|lru"] == 1_024
    assert sample["dry_run_missed_by_state_tokens|lru"] == 1_024
    assert sample["dry_run_evictions|lru"] == 3


def test_a_prompt_longer_than_the_pool_counts_as_rejected_alone():
    shadow = ShadowReplay(2, 2 * 512, COST)
    shadow.observe([1, 2, 3], 512)
    sample = shadow.sample()
    assert sample.pop("dry_run_rejected_requests") == 1
    assert set(sample.values()) == {0}


def test_memory_is_bounded_by_the_kv_pool():
    """A prompt that comes over and over, and others that come once."""
    shadow = ShadowReplay(20, 40 * 512, COST)
    for number in range(3_000):
        first = 10 if number % 2 else 1_000_000 + 10 * number
        shadow.observe(range(first, first + 10), 0)
    tree = shadow._tree
    assert len(tree) == len(shadow._depths) == 40
    assert len(tree._parents) <= 1 + 50  # a prompt's blocks are there before others go
    assert sum(map(len, tree._below.values())) == 36
    assert len(tree._pool._leaves) <= 2 * 40 + 1_024 + 10


def test_a_tree_forgets_what_it_dropped():
    tree = _Tree(4)
    assert tree.admit([1, 2, 3]) == (0, [])
    assert tree.admit([1, 2, 4]) == (2, [])
    assert tree.admit([9]) == (0, [3])
    assert tree.admit([1, 2, 3]) == (2, [4])
    assert sorted(tree._numbers) == [1, 2, 3, 9]
    assert tree._below == {1: {2: None}, 2: {3: None}}
