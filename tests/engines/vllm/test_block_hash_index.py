"""The plugin's map of cached blocks against vLLM's own, call for call."""

import random

import pytest
from vllm.v1.core.block_pool import BlockHashToBlockMap, BlockPool

from statecache._blocks import BlockHashIndex, FifoQueue
from statecache_vllm import seams

KEYS = [b"%d" % i for i in range(12)]


def test_every_answer_is_vllms(share):
    """60,000 random calls on a pool of 8 blocks, several keys a block and blocks a key."""
    rng = random.Random(0)
    blocks = BlockPool(8, enable_caching=True, hash_block_size=16).blocks
    ours, theirs = BlockHashIndex(blocks), BlockHashToBlockMap()
    answers = set()
    for _ in range(int(60_000 * share)):
        key, block = rng.choice(KEYS), rng.choice(blocks)
        match rng.randrange(4):
            case 0:
                if not theirs.contain(key, block.block_id):  # vLLM asks before it inserts
                    ours.insert(key, block)
                    theirs.insert(key, block)
            case 1:
                answer = theirs.pop(key, block.block_id)
                assert ours.pop(key, block.block_id) is answer
                answers.add(answer is None)
            case 2:
                assert ours.contain(key, block.block_id) == theirs.contain(key, block.block_id)
            case 3:
                assert ours.get_one_block(key) is theirs.get_one_block(key)
        assert len(ours) == len(theirs)
    assert answers == {True, False}


class Hashed:
    """What `BlockPool` asks a request for."""

    def __init__(self, *hashes):
        self.block_hashes = hashes


def pools():
    """Two of vLLM's pools of 6 blocks, the second one with the plugin's map and queue."""
    own, with_map = (BlockPool(6, enable_caching=True, hash_block_size=16) for _ in range(2))
    cached = BlockHashIndex(with_map.blocks)
    queue = FifoQueue(cached)
    queue.append_n(with_map.free_block_queue.popleft_n(5))
    seams.require_empty(with_map)
    seams.set_block_map(with_map, cached)
    with_map.free_block_queue = queue
    return own, with_map


def test_a_block_with_two_keys_moves_and_goes_as_in_vllm():
    """A partial block gets a second key; its keys move to another block, which is then evicted."""
    seen = []
    for pool in pools():
        found = []

        def look(pool=pool, found=found):
            for block_hash in (b"half", b"whole"):
                blocks = pool.get_cached_block(block_hash, [0])
                found.append(blocks and [block.block_id for block in blocks])

        first, second = pool.get_new_blocks(2)
        hashed = Hashed(b"half", b"whole")
        for tokens in (16, 32):
            pool.cache_partial_block(hashed, first, tokens, 0, 32)
        look()
        first.reset_hash()
        pool._remove_cached_block_hashes(first)
        pool.cached_block_hash_to_block.pop(seams.key_of(b"whole", 0), first.block_id)
        for block_hash in (b"half", b"whole"):
            pool._insert_block_hash(seams.key_of(block_hash, 0), first, num_tokens=32)
        look()
        pool.move_block_hashes(first, second)
        look()
        pool.free_blocks([second, first])
        pool.evict_blocks({second.block_id})
        look()
        seen.append((found, len(pool.cached_block_hash_to_block)))
    assert seen[0] == seen[1]
    assert any(seen[0][0])
    assert seen[0][0][-2:] == [None, None]


def test_a_pool_that_is_in_use_already_is_refused():
    own, _ = pools()
    (block,) = own.get_new_blocks(1)
    own._insert_block_hash(seams.key_of(b"a", 0), block, num_tokens=16)
    with pytest.raises(SystemExit, match="in use already"):
        seams.require_empty(own)
