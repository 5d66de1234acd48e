"""Excerpts of the recorded workloads, replayed: every total is what the plain replay counts.

excerpt.json is made by excerpt_totals.py, which plays each row with the plain replay; some of its
rows are played so again here.
"""

import json
from pathlib import Path

import pytest

from golden.excerpt_totals import LEARNED, SLOTS, Cell, cells, plain_totals
from statecache.replay.block_policies import block_policy_names
from statecache.replay.block_pools import SlotRule, replay_pool, replay_slots
from statecache.replay.prefix_tree import PreorderTree
from statecache.replay.state_slots import replay
from support.recorded import EXCERPTS, NAMES, schedule_of, tree_of

EXPECTED = {
    Cell(**{name: row[name] for name in Cell._fields}): row["totals"]
    for row in json.loads(Path(__file__).with_name("excerpt.json").read_bytes())
}
PLAYED_AGAIN = [
    cell
    for cell in EXPECTED
    if cell.requests == LEARNED // 4
    or (cell.trace == "conversation" and cell.policy != "learned" and cell.slots in (32, 256))
    or cell[2:] in (("dense", "gds", 16), ("ends", "lru", 64))
]
ONLINE = ("lru", "gds", "learned")
ROOMY = 10**6  # blocks: all KV fits


def test_every_cell_is_expected() -> None:
    assert list(EXPECTED) == list(cells())


@pytest.mark.parametrize("cell", EXPECTED, ids=str)
def test_totals(cell: Cell) -> None:
    schedule = schedule_of(cell.trace, cell.admission, EXCERPTS, cell.requests)
    row = replay(schedule, cell.policy, cell.slots)
    assert {name: getattr(row, name) for name in EXPECTED[cell]} == EXPECTED[cell]


@pytest.mark.parametrize("cell", PLAYED_AGAIN, ids=str)
def test_the_plain_replay_counts_what_is_expected(cell: Cell) -> None:
    assert vars(plain_totals(cell)) == EXPECTED[cell]


@pytest.mark.parametrize("admission", ["dense", "ends"])
@pytest.mark.parametrize("trace", NAMES)
def test_knowing_the_future_is_best_and_room_for_all_is_the_ceiling(
    trace: str, admission: str
) -> None:
    schedule = schedule_of(trace, admission, EXCERPTS)
    for slots in SLOTS[trace]:
        online = [
            replay(schedule, policy, slots).hit_tokens for policy in ("lru", "gds", "learned")
        ]
        assert replay(schedule, "clairvoyant", slots).hit_tokens >= max(online), slots
    rows = [replay(schedule, policy, ROOMY) for policy in ("lru", "gds", "learned", "clairvoyant")]
    assert len({row.hit_tokens for row in rows}) == 1
    assert rows[0].hit_tokens <= rows[0].resident_tokens


@pytest.mark.parametrize("trace", NAMES)
def test_with_room_for_all_kv_slots_of_their_own_are_the_plain_replay(trace: str) -> None:
    tree = PreorderTree.of(tree_of(trace, EXCERPTS))
    for slots in SLOTS[trace]:
        row = replay_slots(tree, ROOMY, slots, SlotRule(), state_blocks=1)
        expected = EXPECTED[Cell(trace, None, "dense", "gds", slots)]
        assert row.hit_tokens == expected["hit_tokens"]
        assert row.prompt_tokens == expected["prompt_tokens"]
        assert row.missed_by_state_tokens == expected["missed_by_state_tokens"]
        assert row.evicted_states == expected["evicted_states"]


@pytest.mark.parametrize("admission", ["dense", "ends"])
@pytest.mark.parametrize("trace", NAMES)
def test_with_room_for_all_a_pool_of_blocks_keeps_all_states(trace: str, admission: str) -> None:
    unlimited = replay(schedule_of(trace, admission, EXCERPTS), "lru", ROOMY)
    for name in block_policy_names():
        row = replay_pool(tree_of(trace, EXCERPTS), ROOMY, name, admission, every_blocks=16)
        assert row.hit_tokens == unlimited.hit_tokens, name
        assert row.missed_by_state_tokens == unlimited.missed_by_state_tokens, name
