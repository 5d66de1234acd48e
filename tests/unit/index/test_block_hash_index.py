"""The map of cached blocks, as an engine calls it."""

import dataclasses
import gc
import weakref

import pytest

from statecache._blocks import BlockHashIndex, ReuseQueue


@dataclasses.dataclass(eq=False, slots=True, weakref_slot=True)
class Block:
    """Its number is in a slot, as in vLLM."""

    block_id: int
    pool: object = None


@dataclasses.dataclass(eq=False)
class PlainBlock:
    block_id: int


class Lying:
    @property
    def block_id(self):
        raise OSError("no number today")


def test_the_block_cached_for_longest_is_found():
    blocks = [Block(i) for i in range(3)]
    cached = BlockHashIndex(blocks)
    assert cached.get_one_block(b"a") is None
    for block in (blocks[2], blocks[0]):
        cached.insert(b"a", block)
    cached.insert(b"b", blocks[2])
    assert cached.get_one_block(b"a") is blocks[2]
    assert (len(cached), b"a" in cached, b"c" in cached) == (2, True, False)
    assert cached.contain(b"a", 0)
    assert not cached.contain(b"a", 1)
    assert cached.pop(b"a", 1) is None
    assert cached.pop(b"a", 2) is blocks[2]
    assert cached.get_one_block(b"a") is blocks[0]
    cached.clear()
    assert (len(cached), cached.get_one_block(b"b")) == (0, None)


def test_a_key_that_is_apart_is_not_cached_by_that():
    cached = BlockHashIndex([Block(0)])
    cached.set_has_checkpoint(b"a", True)
    assert cached.has_checkpoint(b"a")
    assert (len(cached), b"a" in cached, cached.get_one_block(b"a")) == (0, False, None)
    cached.clear_checkpoints()
    assert not cached.has_checkpoint(b"a")


@pytest.mark.parametrize("kind", [Block, PlainBlock])
def test_bad_calls_change_nothing(kind):
    blocks = [kind(0), kind(1)]
    cached = BlockHashIndex(blocks)
    cached.insert(b"a", blocks[0])
    for call, error, words in (
        (lambda: cached.insert("a", blocks[1]), TypeError, "expected bytes"),
        (lambda: cached.insert(None, blocks[1]), TypeError, "expected bytes"),
        (lambda: cached.insert(b"b", kind(1)), ValueError, "a block of another pool"),
        (lambda: cached.insert(b"b", kind(7)), ValueError, "a block of another pool"),
        (lambda: cached.insert(b"b", kind(-1)), ValueError, "a block of another pool"),
        (lambda: cached.insert(b"b", kind(2**80)), ValueError, "a block of another pool"),
        (lambda: cached.insert(b"b", kind("0")), TypeError, "integer"),
        (lambda: cached.insert(b"b", None), AttributeError, "block_id"),
        (lambda: cached.insert(b"b", Lying()), OSError, "no number today"),
        (lambda: cached.insert(b"b"), TypeError, "takes 2 arguments, not 1"),
        (lambda: cached.pop(b"a", 0, None), TypeError, "takes 2 arguments, not 3"),
        (lambda: cached.pop(b"a", "0"), TypeError, "integer"),
        (lambda: cached.get_one_block("a"), TypeError, "expected bytes"),
        (lambda: "a" in cached, TypeError, "expected bytes"),
        (lambda: BlockHashIndex([]), ValueError, "without blocks"),
        (lambda: BlockHashIndex(None), TypeError, "not iterable"),
        (lambda: BlockHashIndex(), TypeError, "blocks"),
        (lambda: ReuseQueue({}, b"kv"), TypeError, "BlockHashIndex"),
    ):
        with pytest.raises(error, match=words):
            call()
        assert len(cached) == 1
        assert cached.get_one_block(b"a") is blocks[0]
    for number in (-1, 2, 2**32, 2**80):
        assert not cached.contain(b"a", number)
        assert cached.pop(b"a", number) is None


def test_a_block_whose_number_is_gone_is_refused():
    blocks = [Block(0), Block(1)]
    cached = BlockHashIndex(blocks)
    del blocks[1].block_id
    with pytest.raises(AttributeError, match="block_id"):
        cached.insert(b"a", blocks[1])
    assert len(cached) == 0


def test_a_number_that_another_class_keeps_is_read_as_python_reads_it():
    """In `Other` it lies where `Odd` has something else, a number that would be right."""

    class Other:
        __slots__ = ("block_id",)

    class Odd:
        __slots__ = ("something",)
        block_id = Other.block_id

    odd = Odd()
    odd.something = 0
    with pytest.raises(TypeError, match="doesn't apply to a 'Odd' object"):
        BlockHashIndex([odd]).insert(b"a", odd)


def test_blocks_outlive_the_list_and_go_with_the_map():
    blocks = [Block(0)]
    cached, alive = BlockHashIndex(blocks), weakref.ref(blocks[0])
    cached.insert(b"a", blocks[0])
    blocks.clear()
    assert cached.get_one_block(b"a") is alive()
    alive().pool = cached  # as a block of vLLM knows its pool, and the pool its map
    del cached
    gc.collect()
    assert alive() is None


def test_keys_of_any_length():
    blocks = [Block(i) for i in range(4)]
    cached = BlockHashIndex(blocks)
    keys = [b"", b"\0", b"\0\0", b"x" * 100_000]
    for key, block in zip(keys, blocks, strict=True):
        cached.insert(key, block)
    assert [cached.get_one_block(key) for key in keys] == blocks
    assert cached.get_one_block(b"\0\0\0") is None
