"""Slots in host memory: whenever copies run, a load brings back what was stored last."""

import random
from contextlib import nullcontext

import pytest
import torch

from statecache.checkpoint import pool as pool_module
from statecache.checkpoint.ops import native_ops
from statecache.checkpoint.pool import ActiveState, CheckpointPool, SideState
from support.late_streams import LateStreams

ACTIVE, SLOTS, LAYERS = 6, 7, 2
# What may be left out of HostSlots, and each of it must show.
WAITS = (
    "compute after in",  # a kernel reads a row before the slot is in it
    "compute after out",  # a kernel writes a row that is still being copied
    "in after compute",  # a row is fetched into that a kernel still reads
    "in after out",  # a slot is read before its copy from the device has ended
    "out after compute",  # a row is copied before the kernel has written it
)


def fresh_state() -> ActiveState:
    """Two layers, a row of 12 bytes and one of 3: parts are not multiples of 16 bytes."""
    return ActiveState(
        torch.zeros(LAYERS, ACTIVE, 2, 8, 8),
        [torch.zeros(LAYERS, ACTIVE, 3)],
        {"odd": SideState(torch.zeros(ACTIVE, 3, dtype=torch.uint8), slot_dim=0)},
    )


def fill(active: ActiveState, slot: int, value: int) -> None:
    active.temporal[:, slot] = value
    active.conv[0][:, slot] = value
    active.side["odd"].tensor[slot] = value


def values(active: ActiveState, slot: int) -> set[float]:
    rows = active.temporal[:, slot], active.conv[0][:, slot], active.side["odd"].tensor[slot]
    return {round(float(value), 4) for row in rows for value in row.unique()}


def play(seed: int, mode: str, ring: int, dropped: str = "") -> tuple[list, list, LateStreams]:
    """Store and load at random; return what the active slots hold, and what they should."""
    rng = random.Random(seed)
    streams = LateStreams(rng, dropped)
    active = fresh_state()
    pool = CheckpointPool(
        active,
        SLOTS,
        mode=mode,
        memory="host",
        ring=ring,
        streams=streams,
        copies=native_ops(),
    )
    pool._launches.ops = streams.late(native_ops())
    slots = pool.alloc(SLOTS)
    held, stored = dict.fromkeys(range(ACTIVE), 0), {}
    for step in range(1, 30):
        count = rng.randint(1, 4)
        rows = rng.sample(range(ACTIVE), count)
        kind = rng.choice(("forward", "store", "store", "load", "failing store"))
        if kind == "forward":
            for at, row in enumerate(rows):
                value = step * 4 % 120 + at
                streams.compute(lambda row=row, value=value: fill(active, row, value))
                held[row] = value
        elif kind == "store":
            targets = rng.sample(slots, count)
            pool.store(active, rows, targets)
            stored.update(zip(targets, (held[row] for row in rows), strict=True))
        elif kind == "failing store" and mode == "native":
            targets = rng.sample(slots, count)
            pool._launches.ops = streams.late(native_ops(), fails=True)
            with pytest.raises(RuntimeError, match="planted"):
                pool.store(active, rows, targets)
            pool._launches.ops = streams.late(native_ops())
            for slot in targets:
                stored.pop(slot, None)
        elif stored:
            sources = rng.choices([*stored], k=count)
            if mode == "int8":
                streams.finish_kernels()  # a load waits for the flags of its slots' stores
            pool.load(sources, active, rows)
            held.update(zip(rows, (stored[slot] for slot in sources), strict=True))
        streams.run(rng.choice((0, 0, 1, 5)))
    streams.run()
    found = [values(active, row) for row in range(ACTIVE)]
    return found, [{float(held[row])} for row in range(ACTIVE)], streams


@pytest.mark.parametrize("mode", ["native", "int8"])
@pytest.mark.parametrize("ring", [1, 2, 3, 8])
def test_late_copies_change_nothing(mode: str, ring: int) -> None:
    waits = set()
    for seed in range(5):
        found, expected, streams = play(seed, mode, ring)
        assert found == expected, seed
        waits |= streams.waits
    # A stream does what it is asked in order, so that it need not wait for itself.
    assert waits - {"compute after compute"} == {*WAITS}


@pytest.mark.parametrize("dropped", WAITS)
def test_no_wait_can_be_left_out(dropped: str) -> None:
    outcomes = (play(seed, "native", 3, dropped)[:2] for seed in range(40))
    assert any(found != expected for found, expected in outcomes)


def test_a_store_that_fails_keeps_its_rows(monkeypatch) -> None:
    """What was launched before it failed may come late, too."""
    monkeypatch.setattr(pool_module, "turn_on", lambda _memory, _rows: nullcontext())
    outcomes = (play(seed, "native", 3)[:2] for seed in range(40))
    assert any(found != expected for found, expected in outcomes)
