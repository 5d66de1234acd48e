"""One pool of blocks for KV and states, worked by hand. A letter is a block, a state one block.

A request of n blocks takes blocks for its KV, then one for its state, in the end one for its rest
and one for the state it decodes with. It lets go: the last two, its state, its KV from the end.
"""

import pytest

from statecache.errors import SettingsError
from statecache.replay.block_policies import ReuseBlockPolicy
from support.pool_support import Shared


def test_blocks_are_let_go_states_first_then_kv_from_the_end() -> None:
    # abc takes KV 0 1 2, state 3, rest 4, running state 5. The last two have no key: each goes in
    # front of 6 and 7, which were never used.
    pool = Shared(8)
    assert pool.play("abc") == [(0, 0)]
    assert pool.free_blocks() == [5, 4, 6, 7, 3, 2, 1, 0]


def test_the_block_let_go_first_is_handed_out_first() -> None:
    # xy takes 5 4, state 6, rest 7, and 3, the state of abc, which abcd can then not resume from.
    pool = Shared(8)
    assert pool.play("abc xy abcd") == [(0, 0), (0, 0), (3, 0)]
    pool = Shared(8)
    pool.play("abc xy")
    assert pool.free_blocks() == [3, 7, 2, 1, 0, 6, 4, 5]
    assert pool.driver.evicted_states == 1
    # One block more, and the state is still there.
    assert Shared(9).play("abc xy abcd") == [(0, 0), (0, 0), (3, 3)]


def test_the_last_block_of_a_prompt_is_always_computed() -> None:
    # abc is there whole, with its state at 3: only a state at 2 could serve it.
    assert Shared(20).play("abc abc") == [(0, 0), (2, 0)]


def test_a_state_with_a_part_gone_serves_nothing() -> None:
    # States of 2: abc takes 0 1 2, state 3 4, rest 5, running 6 7, lets go 7 6 5 .. 4 3 2 1 0.
    # x of 10 takes 7, state 6 5, rest 8, running 9 4: half of the state of abc.
    pool = Shared(10, state_blocks=2)
    assert pool.play("abc x abcd") == [(0, 0), (0, 0), (3, 0)]
    # With 9 blocks x takes both halves, with 11 none.
    assert Shared(9, state_blocks=2).play("abc x abcd") == [(0, 0), (0, 0), (3, 0)]
    assert Shared(11, state_blocks=2).play("abc x abcd") == [(0, 0), (0, 0), (3, 3)]
    for blocks, evicted in ((9, 1), (10, 1), (11, 0)):
        pool = Shared(blocks, state_blocks=2)
        pool.play("abc x")
        assert pool.driver.evicted_states == evicted


def test_a_junction_keeps_a_state_where_the_resident_kv_ends() -> None:
    # abq finds ab, but no state there: it sets one at the junction, which abz resumes from.
    assert Shared(40, admission="branch-points").play("abc abq abz") == [(0, 0), (2, 0), (2, 2)]
    assert Shared(40, admission="ends").play("abc abq abz") == [(0, 0), (2, 0), (2, 0)]


def test_dense_keeps_states_at_multiples_and_the_end() -> None:
    # Every 2: abcde leaves states at 2, 4, 5. abcx reaches 3 and resumes at 2.
    assert Shared(40, admission="dense").play("abcde abcx abcdy") == [(0, 0), (3, 2), (4, 4)]
    # dense leaves none at the branch point 3, dense+branch-points does.
    assert Shared(40, admission="dense").play("abcde abcx abcz")[-1] == (3, 2)
    assert Shared(40, admission="dense+branch-points").play("abcde abcx abcz")[-1] == (3, 3)


# Copies.


def test_without_deduplication_a_missed_region_is_there_twice() -> None:
    # abc: KV 0 1 2, state 3, rest 4, running 5; 5 4 6 .. 11 have no key, then 3 2 1 0.
    # abq resumes from nothing: KV 5 4 6, state 7, rest 8, running 9. With fifo all stay where
    # they are let go: state 7, q 6, second b 4, second a 5.
    pool = Shared(12)
    pool.play("abc abq")
    assert pool.free_blocks() == [9, 8, 10, 11, 3, 2, 1, 0, 7, 6, 4, 5]


def test_of_two_copies_the_one_let_go_first_goes_first() -> None:
    # As above; b 1 and a 0 become duplicates when 4 and 5 come back.
    pool = Shared(12, "duplicates")
    pool.play("abc abq")
    assert pool.free_blocks() == [9, 8, 10, 11, 1, 0, 3, 2, 7, 6, 4, 5]


def test_a_copy_goes_first_while_another_one_is_in_use() -> None:
    pool = Shared(12, "duplicates").driver.pool
    first, second, third = pool.allocate(3, protected=False)
    for block in (first, second):
        pool.cache(block, 7)
    pool.cache(third, 8)
    pool.free([third, second])  # first is in use
    assert pool.policy.free_blocks()[-2:] == [second, third]
    # In use, the copy that is hit is the first one cached: the free one stays a copy.
    assert pool.hit(7) == first
    pool.free([first])
    assert pool.policy.free_blocks()[-2:] == [second, third]
    pool.free([first])  # the last use: first is kept in its own right, at the end
    assert pool.policy.free_blocks()[-3:] == [second, third, first]


# Reuse.

PRESSURE = "abcd abcde xy pq abcdef"


@pytest.mark.parametrize(
    ("block_policy", "ratio", "last"),
    [("fifo", None, (4, 0)), ("reuse", 1, (4, 0)), ("reuse", 4, (5, 5)), ("reuse", None, (4, 0))],
)
def test_what_was_reused_outlives_what_was_not(
    block_policy: str, ratio: int | None, last: tuple[int, int]
) -> None:
    # 12 blocks. abcd: KV 0-3, state 4, rest 5, running 6. abcde resumes from 4 of 5: protected
    # are 0-3 and 4, which it hit, and e 6 and state 5. xy takes 8 7, state 9, rest 10, running 11.
    # pq finds 11 10 without a key and takes three more. Fifo: the oldest, states 4 and 5, and
    # e 6. Reuse at pq, the fourth lookup: protected ones were let go at the second, age 3, xy's at
    # the third, age 2. At a ratio of 1 (where learning starts) protected ones are older; at 4 xy's
    # go.
    assert Shared(12, block_policy, ratio=ratio).play(PRESSURE)[-1] == last


def test_a_request_that_resumed_from_less_than_three_quarters_protects_only_what_it_hit() -> None:
    # abc resumes from 2 of 3, 4 * 2 < 3 * 3: its c and state are on probation and go before xy's
    # at any ratio, ab and its state do not. 10 blocks: ab 0 1, state 2, rest 3, running 4;
    # abc: c 4, state 3, rest 5, running 6; lets go: 6 5 7 8 9 / protected 2 1 0 / probation 3 4.
    pool = Shared(10, "reuse", ratio=4)
    assert pool.play("ab abc") == [(0, 0), (2, 2)]
    assert pool.free_blocks() == [6, 5, 7, 8, 9, 2, 1, 0, 3, 4]


def test_at_equal_ages_the_unproven_go() -> None:
    # As above; wxyz takes the five blocks without a key and two more. All others were let go by
    # abc, so at a ratio of 1 its own c and state go, and ab stays.
    assert Shared(10, "reuse", ratio=1).play("ab abc wxyz abq")[-1] == (2, 2)


def policy_of_four() -> ReuseBlockPolicy:
    return ReuseBlockPolicy(4, {}, [0] * 4)


def lose(policy: ReuseBlockPolicy, key: int, *, protected: bool) -> None:
    block = policy.take()
    policy.computed(block, protected=protected)
    policy.lost(block, key)
    policy.give_bare(block)


def test_the_ratio_rises_when_proven_kv_is_asked_for_again_and_falls_when_fresh_is() -> None:
    policy = policy_of_four()
    lose(policy, 7, protected=True)
    policy.looked_up([7])
    for _ in range(62):
        policy.looked_up([])
    assert policy.ratio == 1
    policy.looked_up([])  # the 64th: protected KV was asked for, nothing on probation was dropped
    assert policy.ratio * 5 == 7
    lose(policy, 8, protected=False)
    policy.looked_up([8])
    for _ in range(63):
        policy.looked_up([])
    assert policy.ratio == 1  # nothing protected was dropped since (1 // 2 = 0 is left of before)


def test_what_was_dropped_as_many_blocks_ago_as_the_pool_has_is_forgotten() -> None:
    policy = policy_of_four()
    lose(policy, 7, protected=True)
    for _ in range(4):
        policy.give_bare(policy.take())
    for _ in range(64):
        policy.looked_up([7])
    assert policy.ratio == 1


# What a request holds.


def test_running_states_and_the_rest_need_room() -> None:
    # States of 3: ab needs 2 + 3 + 1 + 3 = 9.
    assert Shared(8, state_blocks=3).play("ab") == [None]
    assert Shared(9, state_blocks=3).play("ab") == [(0, 0)]


def test_a_chunk_of_16_blocks_lets_the_state_before_the_last_go() -> None:
    # 40 blocks in chunks of 16, 16 and 8: never more than 2 states, of 2, beside 40 and the rest.
    prompt = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMN"
    assert Shared(44, state_blocks=2).play(prompt) == [None]
    assert Shared(45, state_blocks=2).play(prompt) == [(0, 0)]


def test_a_request_too_large_is_rejected_and_changes_nothing() -> None:
    # abcdef needs 6 + 3; reuse would have counted its lookup, and hit abc.
    pool = Shared(8, "reuse")
    pool.play("abc")
    before = pool.free_blocks()
    assert pool.play("abcdef") == [None]
    assert pool.free_blocks() == before
    # Letters mean the same nodes in one list of prompts only.
    assert Shared(8, "reuse").play("abc abcdef abcd") == [(0, 0), None, (3, 3)]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"block_policy": "lifo"}, "unknown block policy 'lifo'"),
        ({"admission": "all"}, "unknown admission 'all'"),
        ({"blocks": 0}, "pool-blocks is 0"),
        ({"state_blocks": 0}, "state-blocks is 0"),
    ],
)
def test_bad_settings_are_named(changes: dict[str, object], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        Shared(**({"blocks": 9} | changes))  # type: ignore[arg-type]
