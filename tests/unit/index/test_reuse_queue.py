"""The rules of the block policy `reuse`, worked by hand."""

import pytest

from support.queue_pools import cached, order, reuse


def test_blocks_without_a_hash_go_first_then_copies():
    """Blocks 0 and 1 hold the same key: the one freed first is the copy that goes."""
    pool = reuse(4)
    first, second = pool.allocate(2)
    pool.set_hash(first, b"1kv")
    pool.set_hash(second, b"1kv")
    pool.free([first])
    assert order(pool) == [2, 3, 0]
    pool.free([second])
    assert order(pool) == [2, 3, 0, 1]
    assert [b.block_id for b in pool.allocate(3)] == [2, 3, 0]
    assert pool.any_block(b"1kv") is second


def test_a_copy_goes_first_while_another_one_is_in_use():
    pool = reuse(3)
    first, second = pool.allocate(2)
    pool.set_hash(first, b"1kv")
    pool.set_hash(second, b"1kv")
    pool.free([second])
    cached(pool, b"2kv")  # takes block 2, the only one without a hash
    assert order(pool) == [1, 2]


def test_with_equal_ages_the_block_on_probation_goes():
    pool = reuse(2)
    cached(pool, b"1kv", protected=True)
    cached(pool, b"2kv", protected=False)
    assert pool.queue.popleft().block_hash == b"2kv"


def test_an_older_protected_block_goes_before_a_younger_one_on_probation():
    """Ages 2 and 1 at the ratio 1: 1*1 < 1*2, so the protected one."""
    pool = reuse(2)
    cached(pool, b"1kv", protected=True)
    pool.queue.looked_up([])
    cached(pool, b"2kv", protected=False)
    assert pool.queue.popleft().block_hash == b"1kv"


def test_the_ratio_rises_when_protected_blocks_are_missed_and_those_on_probation_are_not():
    """One of each is dropped, the protected one asked for: 1*1 > 0*1 at the 64th lookup."""
    pool = reuse(2)
    cached(pool, b"1kv", protected=True)
    cached(pool, b"2kv", protected=False)
    pool.allocate(2)
    pool.queue.looked_up([b"1"])
    assert pool.queue.ratio == 0
    for _ in range(63):
        pool.queue.looked_up([])
    assert pool.queue.ratio == 1


@pytest.mark.parametrize(("further", "ratio"), [(1, 1), (2, 0)])
def test_what_was_dropped_as_many_allocations_ago_as_there_are_blocks_is_forgotten(further, ratio):
    """Of 2 blocks kv1 is dropped by the 4th allocation; after the 6th it is 2 allocations old."""
    pool = reuse(2)
    cached(pool, b"1kv", b"2kv", protected=True)
    pool.free(pool.allocate(2))
    for _ in range(further):
        pool.free(pool.allocate(1))
    for _ in range(64):
        pool.queue.looked_up([b"1"])
    assert pool.queue.ratio == ratio


def test_a_block_that_was_hit_is_protected():
    pool = reuse(2)
    cached(pool, b"1kv")
    cached(pool, b"2kv")
    block = pool.any_block(b"1kv")
    pool.touch(block)
    pool.free([block])
    assert pool.queue.popleft().block_hash == b"2kv"
