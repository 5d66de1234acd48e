"""The block orders on traces small enough to follow by hand."""

import copy
import gc
import pickle
import random
import weakref

import pytest

from statecache._blocks import BlockHashIndex, FifoQueue
from support.block_pool import Block, Pool
from support.queue_pools import cached, fifo, order, reuse


@pytest.mark.parametrize("make", [reuse, fifo])
def test_blocks_kept_elsewhere_go_before_other_cached_ones(make):
    pool = make(3)
    pool.cached.set_has_checkpoint(b"1state", True)
    cached(pool, b"1kv", b"1state", b"2kv")
    assert pool.queue.popleft().block_hash == b"1state"


@pytest.mark.parametrize("make", [reuse, fifo])
def test_the_last_copy_of_a_key_is_told_when_it_goes(make):
    pool = make(3)
    gone = []
    pool.queue.lost = gone.append
    first, second, third = pool.allocate(3)
    for block, key in ((first, b"1kv"), (second, b"1kv"), (third, b"2kv")):
        pool.set_hash(block, key)
    pool.free([first, second, third])
    pool.allocate(1)
    assert gone == []
    pool.allocate(2)
    assert gone == [b"1kv", b"2kv"]


@pytest.mark.parametrize("make", [reuse, fifo])
def test_two_copies_that_go_together_are_told_once(make):
    pool = make(2)
    gone = []
    pool.queue.lost = gone.append
    blocks = pool.allocate(2)
    for block in blocks:
        pool.set_hash(block, b"1kv")
    pool.free(blocks)
    pool.allocate(2)
    assert gone == [b"1kv"]


@pytest.mark.parametrize("make", [reuse, fifo])
def test_no_more_blocks_than_there_are(make):
    pool = make(2)
    with pytest.raises(ValueError, match="3 blocks asked for, 2 are free"):
        pool.allocate(3)
    pool.allocate(2)
    with pytest.raises(ValueError, match="no free blocks"):
        pool.queue.popleft()
    with pytest.raises(RuntimeError, match="block 0 is not in the free queue"):
        pool.queue.remove(pool.blocks[0])


@pytest.mark.parametrize("make", [reuse, fifo])
def test_the_blocks_of_a_hit_leave_together_or_not_at_all(make):
    """Of 5 blocks 0 is in use and only counted; 1, named twice, and 2 leave; 3 is null."""
    pool = make(5)
    pool.allocate(1)
    first, *others = pool.blocks
    for wrong, error, message in (
        (Block(1), ValueError, "another pool"),
        (Block(4, ref_cnt="1"), TypeError, "integer is required"),
        (object(), AttributeError, "is_null"),
        (None, AttributeError, "is_null"),
    ):
        with pytest.raises(error, match=message):
            pool.queue.touch([others[0], first, wrong])
    first.ref_cnt = 0  # against what the queue knows
    with pytest.raises(RuntimeError, match="block 0 is not in the free queue"):
        pool.queue.touch([*others, first])
    first.ref_cnt = 1
    assert pool.queue.num_free_blocks == 4
    assert [block.ref_cnt for block in pool.blocks] == [1, 0, 0, 0, 0]
    pool.queue.touch(block for block in (others[0], first, others[1], others[0]))
    assert [block.ref_cnt for block in pool.blocks] == [2, 2, 1, 0, 0]
    assert pool.queue.get_all_free_blocks() == others[2:]
    pool.queue.touch([])
    others[2].is_null = True
    others[2].ref_cnt = -2_000  # vLLM takes its null blocks back more often than it hands them out
    pool.queue.touch(others[2:])
    assert [block.ref_cnt for block in pool.blocks] == [2, 2, 1, -1_999, 1]
    assert pool.queue.get_all_free_blocks() == [others[2]]


def test_uses_are_counted_on_blocks_without_slots_and_beyond_small_numbers():
    """1,000 uses of a block with attributes in a dictionary, behind a property or in a slot."""

    class Plain:
        def __init__(self, block_id):
            self.block_id, self.ref_cnt, self.is_null = block_id, 0, False

    class Computed(Plain):
        @property
        def ref_cnt(self):
            return self.uses

        @ref_cnt.setter
        def ref_cnt(self, uses):
            self.uses = uses

    for kind in (Plain, Computed, Block):
        blocks = [kind(0), kind(1)]
        queue = FifoQueue(BlockHashIndex(blocks))
        queue.append_n(blocks)
        for _ in range(1000):
            queue.touch(blocks[:1])
        assert [block.ref_cnt for block in blocks] == [1000, 0]
        assert queue.get_all_free_blocks() == blocks[1:]


@pytest.mark.parametrize("name", ["append_n", "touch"])
def test_a_list_that_a_block_changes_when_it_is_asked_is_read_as_it_was(name):
    """The first of 1,000 blocks empties the list, and its memory is used for something else."""
    given, other = [], []

    class Emptying:
        is_null = False

        def __init__(self, number):
            self.number, self.ref_cnt = number, 0

        @property
        def block_id(self):
            if given:
                given.clear()
                other.extend(bytearray(8_000) for _ in range(100))
            return self.number

    blocks = [Emptying(number) for number in range(1000)]
    queue = FifoQueue(BlockHashIndex(blocks))
    if name == "touch":
        queue.append_n(blocks)
    given += blocks
    getattr(queue, name)(given)
    assert given == []
    assert queue.num_free_blocks == (0 if name == "touch" else 1000)
    assert {block.ref_cnt for block in blocks} == {1 if name == "touch" else 0}


@pytest.mark.parametrize("make", [reuse, fifo])
def test_a_use_that_cannot_be_counted_takes_back_the_others(make):
    """Block 0 is in use, 1 and 2 are free; 3 is in use as often as can be counted."""
    pool = make(5)
    pool.allocate(1)
    pool.queue.remove(pool.blocks[3])
    pool.blocks[3].ref_cnt = 2**63 - 1
    with pytest.raises(OverflowError, match="too many uses of a block"):
        pool.queue.touch(pool.blocks[:4])
    assert [block.ref_cnt for block in pool.blocks] == [1, 0, 0, 2**63 - 1, 0]
    assert order(pool) == [1, 2, 4]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_block_that_refuses_its_count_takes_back_the_others():
    """Of 4 blocks the third one fails; the first one then cannot be taken back, and is told of."""

    class Refusing:
        is_null, refuses = False, ()

        def __init__(self, number):
            self.block_id, self.uses = number, 0

        @property
        def ref_cnt(self):
            return self.uses

        @ref_cnt.setter
        def ref_cnt(self, uses):
            if uses in self.refuses:
                raise OSError("not today")
            self.uses = uses

    blocks = [Refusing(number) for number in range(4)]
    queue = FifoQueue(BlockHashIndex(blocks))
    queue.append_n(blocks)
    blocks[2].refuses = (1,)
    for refuses, uses in (((), [0, 0, 0, 0]), ((0,), [1, 0, 0, 0])):
        blocks[0].refuses = refuses
        with pytest.raises(OSError, match="not today"):
            queue.touch(blocks)
        assert [block.uses for block in blocks] == uses
        assert queue.get_all_free_blocks() == blocks


@pytest.mark.parametrize("make", [reuse, fifo])
def test_after_a_reset_no_block_has_a_key(make):
    pool = make(3)
    cached(pool, b"1kv", b"2kv")
    pool.reset()
    gone = []
    pool.queue.lost = gone.append
    assert sorted(b.block_id for b in pool.allocate(3)) == [0, 1, 2]
    assert gone == []


def test_a_block_whose_hash_was_cleared_goes_first():
    pool = reuse(2)
    cached(pool, b"1kv", b"2kv")
    pool.evict(pool.any_block(b"1kv"))
    assert order(pool)[0] == 0
    assert len(pool.allocate(2)) == 2


def test_fifo_is_first_in_first_out_and_puts_blocks_without_a_hash_in_front():
    pool = fifo(4)
    cached(pool, b"1kv", b"2kv")
    assert order(pool) == [2, 3, 1, 0]
    bare = pool.allocate(2)
    pool.free(bare)
    assert order(pool) == [2, 3, 1, 0]


def test_errors_of_each_kind_change_nothing():
    pool = fifo(2)
    taken, other = pool.allocate(1)[0], Pool(2).blocks[0]
    for call, error, words in (
        (lambda: pool.queue.append(pool.blocks[1]), RuntimeError, "block 1 is free already"),
        (lambda: pool.queue.prepend_n([taken, taken]), RuntimeError, "block 0 is free already"),
        (lambda: pool.queue.append(other), ValueError, "a block of another pool"),
        (lambda: pool.queue.append(None), AttributeError, "block_id"),
        (lambda: pool.queue.append_n(7), TypeError, "not iterable"),
    ):
        with pytest.raises(error, match=words):
            call()
        assert order(pool) == [1]
        assert pool.queue.num_free_blocks == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_blocks_are_handed_out_whatever_the_listener_does():
    def listener(key):
        raise OSError(key)

    pool = fifo(2)
    cached(pool, b"1kv")
    pool.queue.lost = listener
    assert [b.block_id for b in pool.allocate(2)] == [1, 0]


def test_what_a_listener_returns_is_let_go_and_it_may_take_blocks():
    """Blocks 0 to 2 go and are told one by one; the first time the listener takes the other two."""

    class Answer:
        pass

    pool, answers, told = fifo(5), [], []
    cached(pool, b"5kv", b"4kv", b"3kv", b"2kv", b"1kv")

    def listener(key):
        told.append(key)
        if pool.queue.num_free_blocks:
            pool.queue.popleft_n(2)
        answers.append(weakref.ref(made := Answer()))
        return made

    pool.queue.lost = listener
    pool.queue.popleft_n(3)
    assert told == [b"1kv", b"4kv", b"5kv", b"2kv", b"3kv"]
    assert [answer() for answer in answers] == [None] * 5


def test_a_list_of_blocks_that_is_changed_changes_no_queue():
    pool = fifo(3)
    blocks = list(pool.blocks)
    pool.blocks.clear()
    assert pool.queue.popleft_n(3) == blocks


def test_more_blocks_than_memory_holds_are_refused_like_any_others():
    pool = fifo(1)
    for n in (2**40, 2**63):
        with pytest.raises(ValueError, match=f"{n} blocks asked for, 1 are free"):
            pool.queue.popleft_n(n)


def test_a_cache_that_drops_keys_without_a_word_stops_no_queue():
    """What is a copy of what is then wrong; every block still comes back once."""
    rng = random.Random(0)
    pool = reuse(4)
    keys, used = [b"1kv", b"2kv", b"3kv"], []
    for _ in range(5_000):
        if used and rng.random() < 0.5:
            for block in pool.blocks:
                for key in keys:
                    pool.cached.pop(key, block.block_id)
                if rng.random() < 0.7:
                    pool.cached.insert(rng.choice(keys), block)
            pool.queue.append(used.pop(rng.randrange(len(used))))
        elif len(used) < 4:
            used.append(pool.queue.popleft())
        assert len(set(order(pool))) == pool.queue.num_free_blocks == 4 - len(used)


@pytest.mark.parametrize("make", [reuse, fifo])
def test_a_queue_cannot_be_copied(make):
    pool = make(2)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(pool.queue, protocol)
        with pytest.raises(TypeError, match="BlockHashIndex"):
            pickle.dumps(pool.cached, protocol)
    with pytest.raises(TypeError):
        copy.copy(pool.queue)


def test_blocks_behind_a_cursor():
    pool = reuse(4)
    cached(pool, b"1kv", b"2kv")
    assert order(pool) == [2, 3, 1, 0]
    for cursor, behind in ((None, [2, 3, 1, 0]), (2, [3, 1, 0]), (1, [0]), (0, [])):
        block = None if cursor is None else pool.blocks[cursor]
        assert [b.block_id for b in pool.queue.iter_blocks_after(block)] == behind
    (used,) = pool.allocate(1)
    assert list(pool.queue.iter_blocks_after(used)) == []


@pytest.mark.parametrize("make", [reuse, fifo])
def test_a_pool_and_its_queue_are_collected_together(make):
    """A block of vLLM knows its pool, and the pool its queue."""
    pool = make(2)
    pool.blocks[0].pool = pool
    pool.queue.lost = pool.drop_hash
    gone = weakref.ref(pool)
    del pool
    gc.collect()
    assert gone() is None
