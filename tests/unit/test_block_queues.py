"""The block orders on traces small enough to follow by hand."""

import pytest

from block_pool import Pool
from statecache_vllm.block_queue import StockQueue
from statecache_vllm.reuse_queue import ReuseQueue


def reuse(total):
    pool = Pool(total)
    pool.queue = ReuseQueue(pool.copies, total, lambda key: key.startswith(b"kv"))
    pool.queue.fill(pool.blocks)
    return pool


def stock(total):
    pool = Pool(total)
    pool.queue = StockQueue(pool.copies, total)
    pool.queue.fill(pool.blocks)
    return pool


def cached(pool, *keys, proven=False):
    """Blocks that a request computed and let go, the last one first."""
    pool.queue.fresh_is_proven = int(proven)
    blocks = pool.allocate(len(keys))
    for block, key in zip(blocks, keys, strict=True):
        pool.set_hash(block, key)
    pool.free(blocks[::-1])
    return [block.block_id for block in blocks]


def order(pool):
    return [block.block_id for block in pool.queue.get_all_free_blocks()]


def test_blocks_without_a_hash_go_first_then_copies():
    """Blocks 0 and 1 hold the same key: the one freed first is the copy that goes."""
    pool = reuse(4)
    first, second = pool.allocate(2)
    pool.set_hash(first, b"kv1")
    pool.set_hash(second, b"kv1")
    pool.free([first])
    assert order(pool) == [2, 3, 0]
    pool.free([second])
    assert order(pool) == [2, 3, 0, 1]
    assert [b.block_id for b in pool.allocate(3)] == [2, 3, 0]
    assert pool.any_block(b"kv1") is second


def test_a_copy_goes_first_while_another_one_is_in_use():
    pool = reuse(3)
    first, second = pool.allocate(2)
    pool.set_hash(first, b"kv1")
    pool.set_hash(second, b"kv1")
    pool.free([second])
    cached(pool, b"kv2")  # takes block 2, the only one without a hash
    assert order(pool) == [1, 2]


def test_with_equal_ages_the_unproven_block_goes():
    pool = reuse(2)
    cached(pool, b"kv1", proven=True)
    cached(pool, b"kv2", proven=False)
    assert pool.queue.popleft().block_hash == b"kv2"


def test_an_older_proven_block_goes_before_a_younger_unproven_one():
    """Ages 2 and 1 at the ratio 1: 1*1 < 1*2, so the proven one."""
    pool = reuse(2)
    cached(pool, b"kv1", proven=True)
    pool.queue.looked_up([])
    cached(pool, b"kv2", proven=False)
    assert pool.queue.popleft().block_hash == b"kv1"


def test_the_ratio_rises_when_proven_blocks_are_missed_and_unproven_ones_are_not():
    """One of each is dropped, the proven one asked for: 1*1 > 0*1 at the 64th lookup."""
    pool = reuse(2)
    cached(pool, b"kv1", proven=True)
    cached(pool, b"kv2", proven=False)
    pool.allocate(2)
    pool.queue.looked_up([b"kv1"])
    assert pool.queue.ratio == 0
    for _ in range(63):
        pool.queue.looked_up([])
    assert pool.queue.ratio == 1


@pytest.mark.parametrize(("further", "ratio"), [(1, 1), (2, 0)])
def test_what_was_dropped_as_many_allocations_ago_as_there_are_blocks_is_forgotten(further, ratio):
    """Of 2 blocks kv1 is dropped by the 4th allocation; after the 6th it is 2 allocations old."""
    pool = reuse(2)
    cached(pool, b"kv1", b"kv2", proven=True)
    pool.free(pool.allocate(2))
    for _ in range(further):
        pool.free(pool.allocate(1))
    for _ in range(64):
        pool.queue.looked_up([b"kv1"])
    assert pool.queue.ratio == ratio


def test_a_block_that_was_hit_is_proven():
    pool = reuse(2)
    cached(pool, b"kv1")
    cached(pool, b"kv2")
    block = pool.any_block(b"kv1")
    pool.touch(block)
    pool.free([block])
    assert pool.queue.popleft().block_hash == b"kv2"


@pytest.mark.parametrize("make", [reuse, stock])
def test_blocks_kept_elsewhere_go_before_other_cached_ones(make):
    pool = make(3)
    pool.queue.apart[b"state1"] = None
    cached(pool, b"kv1", b"state1", b"kv2")
    assert pool.queue.popleft().block_hash == b"state1"


@pytest.mark.parametrize("make", [reuse, stock])
def test_the_last_copy_of_a_key_is_told_when_it_goes(make):
    pool = make(3)
    gone = []
    pool.queue.lost = gone.append
    first, second, third = pool.allocate(3)
    for block, key in ((first, b"kv1"), (second, b"kv1"), (third, b"kv2")):
        pool.set_hash(block, key)
    pool.free([first, second, third])
    pool.allocate(1)
    assert gone == []
    pool.allocate(2)
    assert gone == [b"kv1", b"kv2"]


@pytest.mark.parametrize("make", [reuse, stock])
def test_two_copies_that_go_together_are_told_once(make):
    pool = make(2)
    gone = []
    pool.queue.lost = gone.append
    blocks = pool.allocate(2)
    for block in blocks:
        pool.set_hash(block, b"kv1")
    pool.free(blocks)
    pool.allocate(2)
    assert gone == [b"kv1"]


@pytest.mark.parametrize("make", [reuse, stock])
def test_no_more_blocks_than_there_are(make):
    pool = make(2)
    with pytest.raises(ValueError, match="3 blocks asked for, 2 are free"):
        pool.allocate(3)
    pool.allocate(2)
    with pytest.raises(ValueError, match="no free blocks"):
        pool.queue.popleft()
    with pytest.raises(RuntimeError, match="block 0 is not in the free queue"):
        pool.queue.remove(pool.blocks[0])


@pytest.mark.parametrize("make", [reuse, stock])
def test_after_a_reset_no_block_has_a_key(make):
    pool = make(3)
    cached(pool, b"kv1", b"kv2")
    pool.reset()
    gone = []
    pool.queue.lost = gone.append
    assert sorted(b.block_id for b in pool.allocate(3)) == [0, 1, 2]
    assert gone == []


def test_a_block_whose_hash_was_cleared_goes_first():
    pool = reuse(2)
    cached(pool, b"kv1", b"kv2")
    pool.evict(pool.any_block(b"kv1"))
    assert order(pool)[0] == 0
    assert len(pool.allocate(2)) == 2


def test_stock_is_first_in_first_out_and_puts_blocks_without_a_hash_in_front():
    pool = stock(4)
    cached(pool, b"kv1", b"kv2")
    assert order(pool) == [2, 3, 1, 0]
    bare = pool.allocate(2)
    pool.free(bare)
    assert order(pool) == [2, 3, 1, 0]
