"""What the scheduler's half tells the queue, the map and the checkpoints."""

import random
import types

import pytest
from scheduled import Run, without_states, words
from vllm.v1.core.block_pool import BlockPool

from statecache.checkpoint.proof import Prefix
from statecache.engine.settings import Settings
from statecache_vllm import seams
from statecache_vllm.checkpoints import CheckpointCopy
from statecache_vllm.state_tree import StateTree

BLOCK = 16


def pool(slots, **more):
    return {"checkpoints": "native", "checkpoint_slots": slots, **more}


def prompts(count, tokens=BLOCK * 6 + 1):
    return [words(random.Random(seed), tokens) for seed in range(count)]


def hashes_of(run, prompt):
    """The hashes of the whole blocks of a prompt."""
    return run._hasher(
        types.SimpleNamespace(
            **dict.fromkeys(("lora_request", "cache_salt", "prompt_embeds")),
            block_hashes=[],
            num_tokens=len(prompt),
            all_token_ids=prompt,
            mm_features=[],
        )
    )


def in_checkpoints(run, prompt):
    """The hashes of a prompt at which a state is in a checkpoint."""
    return [
        block_hash
        for block_hash in hashes_of(run, prompt)
        if run.scheduler_side.checkpoints.tree.find(block_hash) is not None
    ]


def drop_checkpoints(run, below):
    """Drop those deeper than so many blocks."""
    checkpoints = run.scheduler_side.checkpoints
    for state in [state for state in checkpoints._slot if checkpoints.tree.depth_of(state) > below]:
        checkpoints._drop(state)


def keys_with_checkpoint(run):
    """The keys of blocks that hold a state which is in a checkpoint, too."""
    keys = {block.block_hash for block in run.pool.blocks} - {None}
    return {key for key in keys if run.scheduler_side.parts.block_index.has_checkpoint(key)}


def test_a_state_has_a_checkpoint_while_it_is_in_a_slot_and_no_longer(model):
    """One slot: the second prompt's state takes it. Then its KV goes, and the state with it."""
    run = Run(model, blocks=80, plugin=pool(1))
    first, second = prompts(2)
    run.ask(first)
    own = keys_with_checkpoint(run)
    assert len(own) == 3  # one block in each group of states
    run.ask(second)
    others = keys_with_checkpoint(run)
    assert len(others) == 3
    assert not others & own
    (state,) = in_checkpoints(run, second)
    kv = seams.key_of(b"", 3)
    run.pool.evict_blocks({b.block_id for b in run.pool.blocks if b.block_hash == state + kv})
    assert len(run.scheduler_side.checkpoints) == 0
    assert keys_with_checkpoint(run) == set()


def test_a_block_that_vllm_evicts_is_the_next_one_to_go(model):
    run = Run(model, blocks=80, plugin={})
    (prompt,) = prompts(1)
    run.ask(prompt)
    kept = [block for block in run.pool.blocks if block.block_hash is not None]
    run.pool.get_new_blocks(79 - len(kept))  # what holds nothing yet
    last = run.pool.free_block_queue.get_all_free_blocks()[-1]
    run.pool.evict_blocks({last.block_id})
    assert run.pool.get_new_blocks(1) == [last]


@pytest.mark.parametrize("how", ["hit in its blocks", "restored"])
def test_a_checkpoint_that_served_is_used_later_than_the_others(model, how):
    """Two slots under lru: the first prompt is asked again, so the third one takes the second's."""
    run = Run(model, blocks=80, plugin=pool(2, policy="lru"))
    first, second, third = prompts(3)
    run.ask(first)
    run.ask(second)
    if how == "restored":
        without_states(run)
    assert run.ask(first) == BLOCK * 6
    assert len(run.restores) == (how == "restored")
    run.ask(third)
    assert [len(in_checkpoints(run, prompt)) for prompt in (first, second, third)] == [1, 0, 1]


def test_the_policy_is_the_one_asked_for():
    """A deep state and then a shallow one: gds drops the shallow one, lru the older one."""
    for policy, gone in (("gds", b"2"), ("lru", b"b")):
        given = {"kv_cache_plugin": "statecache", "policy": policy}
        tree = StateTree(Settings.from_given(given, {}), BLOCK)
        tree.put([b"a", b"b"])
        tree.put([b"2"])
        assert tree.hash_of(tree.peek()) == gone


def test_a_restore_says_how_far_the_kv_reaches(model):
    """A state after 3 blocks, KV of 6: the request starts at 3, and a state at 6 is worth one."""
    run = Run(model, blocks=80, plugin=pool(8))
    (prompt,) = prompts(1)
    run.ask(prompt[: BLOCK * 3 + 1])
    run.ask(prompt)
    drop_checkpoints(run, below=3)
    without_states(run)
    request = run.scheduler.requests[run.add(prompt)]
    found = run.scheduler.kv_cache_manager.get_computed_blocks(request)
    assert found[1:] == (BLOCK * 3, BLOCK * 6)
    run.finish()
    assert run.cached[request.request_id] == BLOCK * 3


def test_a_state_in_blocks_is_not_given_up_for_a_shallower_checkpoint(model):
    """A checkpoint after 3 blocks, a state in blocks after 6, KV of 7: nothing is restored."""
    run = Run(model, blocks=80, plugin=pool(8))
    (prompt,) = prompts(1)
    longer = [*prompt, *words(random.Random(9), BLOCK)]
    for asked in (prompt[: BLOCK * 3 + 1], prompt, longer):
        run.ask(asked)
    deepest = {
        seams.key_of(hashes_of(run, longer)[6], group)
        for group in run.scheduler_side.layout.state_groups
    }
    run.pool.evict_blocks({b.block_id for b in run.pool.blocks if b.block_hash in deepest})
    drop_checkpoints(run, below=3)
    request = run.scheduler.requests[run.add(longer)]
    found = run.scheduler.kv_cache_manager.get_computed_blocks(request)
    assert found[1:] == (BLOCK * 6, BLOCK * 7)
    run.finish()
    assert run.restores == []


def test_a_restore_needs_the_kv_that_vllm_finds(model, monkeypatch):
    """VLLM finds less at the second look, in the group of attention: nothing is promised."""
    run = Run(model, blocks=80, plugin=pool(8))
    (prompt,) = prompts(1)
    run.ask(prompt)
    without_states(run)
    request = run.scheduler.requests[run.add(prompt)]
    coordinator = run.scheduler.kv_cache_manager.coordinator
    original = coordinator.find_longest_cache_hit_per_group

    def shorter(*args):
        blocks, hits = original(*args)
        return blocks, [tokens - BLOCK for tokens in hits]

    monkeypatch.setattr(coordinator, "find_longest_cache_hit_per_group", shorter)
    assert run.scheduler.kv_cache_manager.get_computed_blocks(request)[1] == 0
    assert run.scheduler_side.lookup.planned == {}


def test_a_restore_into_blocks_that_vllm_did_not_take_stops_the_step(model):
    run = Run(model, blocks=80, plugin=pool(8))
    request = run.scheduler.requests[run.add(prompts(1)[0])]
    first, second = (
        [types.SimpleNamespace(block_id=at) for at in (group, 10 + group)] for group in (1, 2)
    )
    taken = types.SimpleNamespace(blocks=[first, second, second, first])
    # The blocks of two groups are those of the other one; or they lie in another column.
    for blocks, depth in (((11, 12, 11), 2), ((11, 12, 12), 1)):
        planned = CheckpointCopy(1, 0, blocks, Prefix(0, depth * BLOCK))
        run.scheduler_side.lookup.planned[request.request_id] = planned
        with pytest.raises(RuntimeError, match="did not take the block"):
            run.scheduler_side.admitted(request, taken)


def test_a_plan_that_a_later_lookup_cannot_repeat_is_forgotten(model):
    run = Run(model, blocks=80, plugin=pool(8))
    (prompt,) = prompts(1)
    run.ask(prompt)
    without_states(run)
    request = run.scheduler.requests[run.add(prompt)]
    lookup = run.scheduler.kv_cache_manager.get_computed_blocks
    assert lookup(request)[1] == BLOCK * 6
    assert len(run.scheduler_side.lookup.planned) == 1
    drop_checkpoints(run, below=0)
    assert lookup(request)[1] == 0
    assert run.scheduler_side.lookup.planned == {}
    run.finish()
    assert run.restores == []
    assert run.cached[request.request_id] == 0


def test_fresh_blocks_are_none_of_those_to_be_kept():
    """Of 5 free blocks 4 are kept: one can be written to, two cannot, and all are free after."""
    own = BlockPool(6, enable_caching=True, hash_block_size=BLOCK)
    blocks = own.get_new_blocks(5)
    own.free_blocks(blocks)
    kept = own.free_block_queue.get_all_free_blocks()[:4]
    (fifth,) = (block for block in blocks if block not in kept)
    assert seams.fresh_blocks(own, 1, kept) == [fifth]
    assert seams.fresh_blocks(own, 2, kept) is None
    assert own.get_num_free_blocks() == 5


def name_blocks(run, request, depth, blocks=(10, 11, 12)):
    """Have these blocks, one in each group, hold the state of a request after `depth` tokens."""
    for group, at in enumerate(blocks):
        key = seams.key_of(request.block_hashes[depth // BLOCK - 1], group)
        run.pool.cached_block_hash_to_block.insert(key, run.pool.blocks[at])


def test_a_state_that_is_offered_in_part_is_not_stored(model):
    """Three groups: a state of two of them, and one that ends inside a block."""
    run = Run(model, blocks=80, plugin=pool(8))
    request = run.scheduler.requests[run.add(prompts(1)[0])]

    def stores(offers):
        state = types.SimpleNamespace(boundary_state_offloads={request.request_id: offers})
        scheduled = {request.request_id: BLOCK * 2}
        return run.scheduler_side.plan(
            types.SimpleNamespace(kv_connector_block_state=state, num_scheduled_tokens=scheduled)
        )[1]

    name_blocks(run, request, BLOCK * 2)
    whole = [(group, 10 + group, BLOCK * 2) for group in range(3)]
    assert stores(whole[:2]) == []
    assert stores([(group, block, tokens + 1) for group, block, tokens in whole]) == []
    assert [copy.blocks for copy in stores(whole)] == [(10, 11, 12)]
    assert stores([("gone", 1, 2)][:0]) == []


def test_a_state_that_the_step_runs_past_is_not_stored(model):
    """From 8 to 40 in blocks of 16: the first block still holds the state after 8."""
    run = Run(model, blocks=80, plugin=pool(8))
    request = run.scheduler.requests[run.add(prompts(1)[0])]
    name, ends = request.request_id, []
    for depth in (BLOCK, 2 * BLOCK, 3 * BLOCK):
        name_blocks(run, request, depth)

    def stores(start, tokens, depth):
        offers = [(group, 10 + group, depth) for group in range(3)]
        state = types.SimpleNamespace(boundary_state_offloads={name: offers})
        request.num_computed_tokens = start
        step = types.SimpleNamespace(
            kv_connector_block_state=state, num_scheduled_tokens={name: tokens}
        )
        return len(run.scheduler_side.plan(step)[1])

    evict, run.pool.evict_blocks = run.pool.evict_blocks, ends.append
    assert stores(BLOCK // 2, 2 * BLOCK, BLOCK) == 0
    assert ends == [{10, 11, 12}]
    assert stores(BLOCK // 2, 2 * BLOCK, 2 * BLOCK) == 1  # written inside the step
    assert stores(BLOCK // 2, BLOCK // 2, BLOCK) == 1  # ends there
    assert stores(BLOCK, 2 * BLOCK, 3 * BLOCK) == 1
    assert len(ends) == 1
    run.pool.evict_blocks = evict


def test_a_state_whose_block_was_handed_on_is_not_stored(model):
    """Offered one pass late, as where steps overlap: one of its blocks is another's by now."""
    run = Run(model, blocks=80, plugin=pool(8))
    request = run.scheduler.requests[run.add(prompts(1)[0])]
    name_blocks(run, request, BLOCK)
    offers = [(group, 10 + group, BLOCK) for group in range(3)]
    step = types.SimpleNamespace(
        kv_connector_block_state=types.SimpleNamespace(
            boundary_state_offloads={request.request_id: offers}
        ),
        num_scheduled_tokens={},
    )
    key = seams.key_of(request.block_hashes[0], 2)
    run.pool.cached_block_hash_to_block.pop(key, 12)
    assert run.scheduler_side.plan(step)[1] == []
    counts = run.scheduler_side.checkpoints.events.numbers
    assert counts["skips|handed_on"] == 1
    run.pool.cached_block_hash_to_block.insert(key, run.pool.blocks[12])
    assert [copy.blocks for copy in run.scheduler_side.plan(step)[1]] == [(10, 11, 12)]


def test_only_prefill_ends_at_the_interval(model):
    """A request of 100 prompt tokens, blocks of 16, an interval of 64."""
    run = Run(model, blocks=80, plugin={"checkpoint_interval": 64, "wait_for_head": "off"})

    def tokens(start, wanted, found=0, total=100):
        request = types.SimpleNamespace(
            num_computed_tokens=start,
            num_prompt_tokens=100,
            num_tokens=total,
            shared_prefix_boundary=0,
        )
        return run.scheduler._mamba_block_aligned_split(request, wanted, found)

    assert tokens(0, 100) == 64
    assert tokens(64, 36) == 32  # at 96, the last full block
    assert tokens(0, 68, found=32) == 32
    assert tokens(127, 5, total=128) == 5  # decoding, with tokens to verify
    assert tokens(100, 60, total=161) == 12  # preempted: computed again
    assert tokens(112, 48, total=161) == 16
