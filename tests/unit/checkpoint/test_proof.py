"""What a slot says of its state, and which share of states is looked at closely."""

import logging

import pytest
import torch

from statecache.checkpoint.proof import Prefix, SlotRecords, is_picked

MINE, DEEPER, OTHER = Prefix(7, 64), Prefix(7, 96), Prefix(8, 64)


class Memory:
    """Slots whose sum is set by hand; how often it was asked for is counted."""

    def __init__(self):
        self.value = dict.fromkeys(range(4), 1)
        self.calls = 0

    def sums(self, slot):
        self.calls += 1
        return torch.tensor([self.value[slot]])


def records(rate):
    memory = Memory()
    return SlotRecords(rate, memory.sums), memory


def test_a_record_fits_its_own_prefix_alone():
    found, _ = records(0.0)
    found.write(2, MINE)
    assert found.mismatch(2, MINE) is None
    assert found.mismatch(2, DEEPER) == "depth"
    assert found.mismatch(2, OTHER) == "prefix"
    assert found.mismatch(1, MINE) == "empty"
    found.write(2, OTHER)
    assert found.mismatch(2, MINE) == "prefix"


def test_a_slot_that_holds_nothing_fits_nothing():
    found, _ = records(0.0)
    for slot in (1, 2, 3):
        found.write(slot, MINE)
    found.erase([1, 0])
    assert [found.mismatch(slot, MINE) for slot in (1, 2, 3)] == ["empty", None, None]
    found.clear()
    assert found.mismatch(2, MINE) == "empty"


def test_at_rate_0_no_byte_is_looked_at():
    found, memory = records(0.0)
    assert not found.write(2, MINE)
    assert found.sums(2) is None
    assert memory.calls == 0


def test_the_sums_of_then_and_now():
    found, memory = records(1.0)
    assert found.write(2, MINE)
    memory.value[2] = 5
    then, now = found.sums(2)
    assert (then.item(), now.item()) == (1, 5)
    assert found.sums(3) is None
    assert memory.calls == 2


def test_the_share_is_a_share_of_the_keys():
    """Keys are evenly spread over 64 bits, signed: of 0, a quarter, a half and three quarters."""
    quarters = [0, 1 << 62, -(1 << 63), -(1 << 62)]
    assert [is_picked(key, 0.5) for key in quarters] == [True, True, False, False]
    assert [is_picked(key, 0.75) for key in quarters] == [True, True, True, False]
    assert [is_picked(key, 0.0) for key in quarters] == [False] * 4
    assert [is_picked(key, 1.0) for key in (*quarters, -1)] == [True] * 5


@pytest.mark.parametrize("when", ["store", "restore"])
def test_a_look_that_fails_ends_the_looking_and_nothing_else(caplog, when):
    caplog.set_level(logging.ERROR, logger="statecache")
    found, memory = records(1.0)
    found.write(1, MINE)
    memory.value.clear()
    if when == "store":
        assert not found.write(2, MINE)
    else:
        assert found.sums(1) is None
    calls = memory.calls
    assert found.mismatch(1, MINE) is None
    assert found.sums(1) is None
    assert not found.write(3, MINE)
    assert found.mismatch(3, MINE) is None
    assert memory.calls == calls
    assert caplog.text.count("none is any more") == 1
