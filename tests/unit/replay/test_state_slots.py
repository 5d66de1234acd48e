"""Replays worked by hand. A letter is a block; a prompt's end is where its state is set.

Tokens are given in blocks of 512.
"""

import pytest

from statecache import CostModel
from statecache.errors import SettingsError
from statecache.replay.kv_residency import kv_timeline
from statecache.replay.prefix_tree import PrefixTree
from statecache.replay.schedule import make_schedule
from statecache.replay.state_slots import ReplayRow, replay
from statecache.trace.format import Request, Trace
from support.replay_support import replay_prompts


def play(
    prompts: str,
    slots: int,
    kv_blocks: int | None = None,
    policy: str = "lru",
    admission: str = "ends",
    chunk_blocks: int = 16,
) -> ReplayRow:
    ids = [[ord(letter) for letter in prompt] for prompt in prompts.split()]
    return replay_prompts(ids, policy, slots, admission, chunk_blocks, kv_blocks)


def blocks(row: ReplayRow) -> tuple[int, int, int]:
    return (row.prompt_tokens // 512, row.resident_tokens // 512, row.hit_tokens // 512)


def test_a_prompt_resumes_from_the_end_of_the_one_it_continues() -> None:
    row = play("ab abcd", slots=4)
    assert blocks(row) == (6, 2, 2)
    assert (row.requests, row.rejected, row.evicted_states) == (2, 0, 0)


def test_the_last_block_of_a_fully_resident_prompt_is_computed() -> None:
    # The second abc could only resume at 2 blocks: no state is there, 2 are missed by state.
    row = play("abc abc", slots=4)
    assert blocks(row) == (6, 2, 0)
    assert row.missed_by_state_tokens == 2 * 512


def test_a_one_block_prompt_never_hits_but_counts() -> None:
    assert blocks(play("a a a", slots=4)) == (3, 0, 0)


def test_prefixes_agree_from_the_start_only() -> None:
    # b is known below a, not at the root: nothing is shared.
    assert blocks(play("ab b bc", slots=4)) == (5, 1, 1)


def test_recompute_cost_is_from_the_hit_to_the_end() -> None:
    row = play("ab abcd", slots=4)
    assert row.recompute_cost == CostModel().cost(0, 1024) + CostModel().cost(1024, 2048)


def test_dense_sets_a_state_at_each_chunk_and_at_the_end() -> None:
    # Chunks of 2: abcde leaves states at 2, 4, 5. abcx resumes at 2 of 3 resident; abcdy at 4.
    row = play("abcde abcx abcdy", slots=9, admission="dense", chunk_blocks=2)
    assert blocks(row) == (14, 7, 6)


def test_one_slot_held_by_the_running_request_takes_no_other_state() -> None:
    # abc resumes at ab, whose state is pinned: abc's own is not kept, and the next abcd hits ab.
    row = play("ab abc abcd", slots=1)
    assert blocks(row) == (9, 2 + 3, 2 + 2)
    assert row.evicted_states == 0


def test_lru_evicts_what_was_used_longest_ago() -> None:
    # 2 slots: ab, cd; abx uses ab and evicts cd; so cdx misses 2, evicting abx (older than ab,
    # which was used again when abx had ended); then aby hits ab.
    row = play("ab cd abx cdx aby", slots=2)
    assert blocks(row) == (13, 6, 4)
    assert row.evicted_states == 3


def test_a_state_already_where_a_prompt_ends_is_used() -> None:
    # 2 slots: ab, cd, and ab again, which finds its state where it ends: so ef evicts cd.
    assert blocks(play("ab cd ab ef abx", slots=2)) == (11, 1 + 2, 2)


def test_only_whole_blocks_count() -> None:
    # 1,100 tokens: the third id names a part of a block.
    requests = [Request(0, 1100, 0, [1, 2, 3]), Request(1, 2048, 0, [1, 2, 3, 4])]
    tree = PrefixTree.of(Trace("t", "", None, requests))
    row = replay(make_schedule(tree, kv_timeline(tree, None), "ends"), "gds", 2)
    assert blocks(row) == (2 + 4, 2, 2)


def test_gds_keeps_what_is_dear_to_rebuild() -> None:
    # 2 slots: abcdef is dear, x1 and x2 are cheap: lru loses abcdef to yz, gds does not.
    assert blocks(play("abcdef xx yz abcdefg", slots=2, policy="gds")) == (17, 6, 6)
    assert blocks(play("abcdef xx yz abcdefg", slots=2, policy="lru")) == (17, 6, 0)


# Limited KV.


def test_a_prompt_larger_than_the_pool_is_rejected_and_changes_nothing() -> None:
    # abcd does not fit 3 blocks. Had it stamped or dropped anything, abx would not hit ab.
    row = play("ab abcd abx", slots=4, kv_blocks=3)
    assert (row.requests, row.rejected) == (2, 1)
    assert blocks(row) == (5, 2, 2)


def test_the_pool_is_rounded_down_to_whole_blocks() -> None:
    tree = PrefixTree.of(Trace("t", "", None, [Request(0, 1024, 0, [1, 2])]))
    assert kv_timeline(tree, 1023).resident == [-1]
    assert kv_timeline(tree, 1024).resident == [0]


def test_leaves_go_first_and_take_their_states_along() -> None:
    # 4 blocks: abc, then xy needs one: leaf c goes with its state, which is no eviction.
    # abz: a, b are resident (2), no state is at 2: 2 missed. It needs z: leaf y of xy goes.
    # xz: x is resident, 1 missed.
    row = play("abc xy abz xz", slots=9, kv_blocks=4)
    assert blocks(row) == (3 + 2 + 3 + 2, 0 + 0 + 2 + 1, 0)
    assert row.evicted_states == 0


def test_least_recently_used_leaves_go_first() -> None:
    # 4 blocks: ab, cd, then abx uses ab and needs 1: d goes (cd is older). cde: c is resident.
    # It needs d and e: of leaves x (request 3) alone, x goes, then b (3).
    # abq: a is resident. Hits: abx at ab (2).
    row = play("ab cd abx cde abq", slots=9, kv_blocks=4)
    assert blocks(row) == (13, 0 + 0 + 2 + 1 + 1, 2)


def test_a_block_of_the_request_itself_never_goes() -> None:
    # 3 blocks: ab, then c; abe needs 1 block: leaf b is older, but its own, so c goes.
    row = play("ab c abe c", slots=9, kv_blocks=3)
    assert blocks(row) == (2 + 1 + 3 + 1, 2, 2)
    # cq would find nothing: c was dropped for abe.
    assert blocks(play("ab c abe cq", slots=9, kv_blocks=3)) == (8, 2, 2)


def test_a_dropped_state_frees_its_slot_and_does_not_raise_the_watermark() -> None:
    # 2 slots, 7 blocks, full with abcd (dear) and efg. hi drops d and c: state abcd goes, so hi
    # finds a slot free, and is worth 2 blocks. jk drops b and a and needs a slot: hi is worth less
    # than efg (3) and goes. Had the watermark risen to the 4 of abcd, hi would be worth 6.
    # So efgx hits efg, and its own state evicts jk.
    row = play("abcd efg hi jk efgx", slots=2, kv_blocks=7, policy="gds")
    assert blocks(row) == (15, 3, 3)
    assert row.evicted_states == 2


# Settings.


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"slots": 0}, "slots is 0"),
        ({"policy": "fifo"}, "unknown policy 'fifo'"),
        ({"admission": "all"}, "unknown admission 'all'"),
        ({"chunk_blocks": 0}, "chunk is 0"),
        ({"kv_blocks": 0}, "kv-tokens is 0"),
    ],
)
def test_bad_settings_are_named(changes: dict[str, object], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        replay_prompts([[1, 2]], **({"policy": "gds", "slots": 1} | changes))  # type: ignore[arg-type]


def test_a_chunk_is_a_whole_number_of_blocks() -> None:
    tree = PrefixTree.of(Trace("t", "", None, [Request(0, 1024, 0, [1, 2])]))
    with pytest.raises(SettingsError, match="chunk is 700"):
        make_schedule(tree, kv_timeline(tree, None), "dense", 700)
