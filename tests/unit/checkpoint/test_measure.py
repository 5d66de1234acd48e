"""The sum of a slot's bytes, and the error of a state at rest, by hand and by plain loops."""

import pytest
import torch

from statecache.checkpoint.formats import FORMATS
from statecache.checkpoint.measure import checksum
from statecache.checkpoint.ops import native_ops, plain_ops
from statecache.checkpoint.pool import ActiveState, CheckpointPool
from support.pool_states import PLACES, L, S, make_active


def sum_by_loop(rows):
    """The same over Python's own integers, byte by byte."""
    total, place = 0, 0
    for row in rows:
        data = bytes(row.contiguous().reshape(-1).view(torch.uint8).tolist())
        for at in range(0, len(data), 8):
            word = int.from_bytes(data[at : at + 8], "little")
            total += (2 * place + 1) * word
            place += 1
    total %= 1 << 64
    return total - (1 << 64) if total >= 1 << 63 else total


def test_words_count_by_their_odd_place_through_all_rows():
    """Words 1, then 2 and 3: 1*1 + 3*2 + 5*3."""
    first = torch.tensor([1, 0, 0, 0, 0, 0, 0, 0], dtype=torch.int8)
    second = torch.tensor([2, 0, 0, 0, 3, 0, 0, 0], dtype=torch.int16)
    assert checksum([first, second]).item() == 1 + 6 + 15


def test_a_row_is_filled_up_with_zeros():
    """Three bytes are the word 1 + 256; the next row begins a new word: 257 + 3*5."""
    rows = [torch.tensor([1, 1, 0], dtype=torch.uint8), torch.tensor([5])]
    assert checksum(rows).item() == 257 + 15


def test_a_sum_is_taken_modulo_two_to_the_64():
    """-1 is 2^64 - 1: the places 1 and 3 make -4."""
    assert checksum([torch.tensor([-1, -1])]).item() == -4


def test_nothing_has_no_sum():
    with pytest.raises(ValueError, match="nothing to add up"):
        checksum([])


def rows_of(pool, slot):
    return list(pool._rows(slot))


@pytest.mark.parametrize("mode", FORMATS)
def test_sums_and_errors_are_the_same_in_host_memory(mode):
    """With a ring of one row, which each slot comes through."""
    active = make_active()
    found = []
    for place in PLACES.values():
        pool = CheckpointPool(active, 3, mode=mode, **place)
        slots = pool.alloc(3)
        pool.store(active, [4, 0, 2], slots).refused()
        error = pool.relative_errors(active, torch.tensor([0]), slots[1])
        found.append((pool.checksums(slots).tolist(), None if error is None else error.tolist()))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("mode", FORMATS)
@pytest.mark.parametrize("apart", [False, True])
def test_the_sum_of_a_slot_is_that_of_a_loop_over_its_bytes(mode, apart):
    active = make_active(apart=apart)
    pool = CheckpointPool(active, 3, mode=mode)
    slots = pool.alloc(3)
    pool.store(active, [4, 0, 2], slots).refused()
    sums = pool.checksums(slots)
    assert sums.dtype == torch.int64
    assert sums.tolist() == [sum_by_loop(rows_of(pool, slot)) for slot in slots]
    assert sum(row.numel() * row.element_size() for row in rows_of(pool, 0)) == pool.bytes_per_state


@pytest.mark.parametrize("mode", FORMATS)
def test_every_flipped_bit_is_found(mode):
    """One bit of each byte of a slot, whichever tensor it is in."""
    active = make_active()
    pool = CheckpointPool(active, 2, mode=mode)
    slots = pool.alloc(2)
    pool.store(active, [1, 3], slots).refused()
    other, before = pool.checksums(slots).tolist()
    # A tensor of the pool lies without gaps, so its rows are views.
    flipped = 0
    for row in rows_of(pool, slots[1]):
        for layer in row.flatten(1) if row.dim() > 1 else [row]:
            data = layer.view(torch.uint8)
            for at in range(0, data.numel(), 37):
                data[at] ^= 1 << (at % 8)
                same, changed = pool.checksums(slots).tolist()
                assert (same, changed != before) == (other, True)
                data[at] ^= 1 << (at % 8)
                flipped += 1
    assert pool.checksums(slots).tolist() == [other, before]
    assert flipped > 50


def test_a_slot_without_a_state_has_no_sum():
    active = make_active()
    pool = CheckpointPool(active, 2)
    (slot,) = pool.alloc(1)
    with pytest.raises(ValueError, match=f"cannot add up slot {slot}: no state is stored in it"):
        pool.checksums([slot])
    with pytest.raises(ValueError, match="it is not allocated"):
        pool.checksums([1 - slot])


@pytest.mark.parametrize("copies", [native_ops(), plain_ops()])
@pytest.mark.parametrize("apart", [False, True])
def test_the_error_of_a_layer_by_hand(copies, apart):
    """A column of 8 values of 1, its first 127: a step is 1, all is exact.

    With .25 added to seven of them: each is a quarter off, and the norm is that of the column.
    """
    layers = torch.zeros(2, S, 1, 8, 8)
    layers[:, 3, 0, :, 0] = torch.tensor([127.0, 1, 1, 1, 1, 1, 1, 1])
    layers[1, 3, 0, 1:, 0] += 0.25
    active = ActiveState(list(layers) if apart else layers)
    pool = CheckpointPool(active, 2, copies=copies)
    (slot,) = pool.alloc(1)
    pool.store(active, [3], [slot]).refused()
    errors = pool.relative_errors(active, torch.tensor([3]), slot)
    expected = (7 * 0.25**2) ** 0.5 / (127**2 + 7 * 1.25**2) ** 0.5
    assert errors.tolist() == [0.0, pytest.approx(expected, rel=1e-6)]


def test_a_state_of_zeros_has_no_error_and_an_exact_format_none_at_all():
    active = ActiveState(torch.zeros(L, S, 1, 8, 8))
    pool, exact = CheckpointPool(active, 1), CheckpointPool(active, 1, mode="native")
    for each in (pool, exact):
        each.alloc(1)
        each.store(active, [0], [0]).refused()
    assert pool.relative_errors(active, torch.tensor([0]), 0).tolist() == [0.0] * L
    assert exact.relative_errors(active, torch.tensor([0]), 0) is None


def test_another_state_stands_out():
    """Its error is above 1: nothing of the norm is explained by it."""
    active = ActiveState(torch.randn(L, S, 2, 16, 16, generator=torch.Generator().manual_seed(1)))
    pool = CheckpointPool(active, 1)
    pool.alloc(1)
    pool.store(active, [0], [0]).refused()
    own = pool.relative_errors(active, torch.tensor([0]), 0)
    other = pool.relative_errors(active, torch.tensor([1]), 0)
    assert own.max() < 0.01 < 1.0 < other.min()
