"""States in slots of their own beside a bounded set of KV blocks, worked by hand."""

import pytest

from statecache.errors import SettingsError
from statecache.replay.block_pools import SlotRule, kv_blocks_beside, replay_slots
from statecache.replay.prefix_tree import PreorderTree
from support.pool_support import play_slots, tree_of


def test_the_tree_is_renumbered_in_preorder() -> None:
    # By first sight: a 1, b 2, c 3, x 4 (below a), p 5, y 6 (below ab). In preorder: a 1, b 2, c 3,
    # y 4, x 5, p 6.
    tree = PreorderTree.of(tree_of("abc ax p aby"))
    assert tree.paths == [[1, 2, 3], [1, 5], [6], [1, 2, 4]]
    assert tree.parents == [-1, 0, 1, 2, 2, 1, 0]
    assert tree.last == [6, 5, 4, 3, 4, 5, 6]


def test_states_do_not_take_kv_blocks() -> None:
    # 6 blocks hold both prompts, and 2 slots both states.
    assert play_slots("abc xyz abcd", kv_blocks=7, slots=2)[0] == [(0, 0), (0, 0), (3, 3)]


def test_dense_states_and_the_slots_that_hold_them() -> None:
    # abcde leaves states at 2, 4, 5 in 3 slots, xy takes the place of the one at 2 (lru).
    served, evicted = play_slots("abcde xy abz", kv_blocks=20, slots=3, admission="dense")
    assert served == [(0, 0), (0, 0), (2, 0)]
    assert evicted == 3  # that one, and for abz, with states at 2 and 3, those at 4 and 5


def test_the_state_a_request_resumed_from_is_never_evicted_for_it() -> None:
    # One slot: abc and abcd both resume from ab, and find no room for their own.
    assert play_slots("ab abc abcd", kv_blocks=9, slots=1) == ([(0, 0), (2, 2), (3, 2)], 0)


@pytest.mark.parametrize(("policy", "last"), [("gds", (6, 6)), ("lru", (4, 0))])
def test_kv_that_no_state_makes_usable_goes_first(policy: str, last: tuple[int, int]) -> None:
    # 2 slots, 10 blocks. gds: uv evicts the state of xy, which costs least; mn needs 2 blocks: y
    # and x are without a state, f is older but has one. lru: uv evicts the state of abcdef, so f
    # and e go, and nothing is left to resume from.
    served, _ = play_slots("abcdef xy uv mn abcdefg", kv_blocks=10, slots=2, policy=policy)
    assert served[-1] == last


@pytest.mark.parametrize(("ratio", "last"), [(1, (4, 4)), (2, (5, 5))])
def test_of_leaves_with_states_those_on_probation_go_sooner(
    ratio: int, last: tuple[int, int]
) -> None:
    # 7 blocks. abcde resumes from 4 of 5: its state is protected. At p, the fourth request, leaves
    # are e, used in the second, age 3, and y, age 2. At a ratio of 2 y goes, as if of age 4.
    served, evicted = play_slots("abcd abcde xy p abcdef", kv_blocks=7, slots=9, ratio=ratio)
    assert served[-1] == last
    assert evicted == 0  # a state that goes with its KV is not evicted


def test_at_equal_ages_the_least_recently_used_goes() -> None:
    # As above, but xy is used again by the fourth request: at p, the fifth, e has age 4 and y 2.
    served, _ = play_slots("abcd abcde xy xy p abcdef", kv_blocks=7, slots=9, ratio=2)
    assert served[-1] == (4, 4)


@pytest.mark.parametrize(("ratio", "last"), [(1, (1, 0)), (2, (2, 2))])
def test_a_point_once_resumed_from_is_protected(ratio: int, last: tuple[int, int]) -> None:
    # 5 blocks. abc resumes from 2 of 3: its own state is on probation, the hit protects that of ab.
    # At p c goes, the older of two leaves on probation; so b is a leaf. At q, the fifth request, b,
    # used in the second, has age 4, and y 3, which counts as 6 at a ratio of 2.
    served, _ = play_slots("ab abc xy p q abz", kv_blocks=5, slots=9, ratio=ratio)
    assert served[-1] == last


def test_a_point_once_resumed_from_stays_proven_when_its_kv_was_gone() -> None:
    # 6 blocks. uvwxyz drops abc; the second ab resumes from nothing and sets its state again. p, q,
    # r and s drop what is left of uvwxyz. At t, the ninth request, only leaves with states are
    # left: b, protected, used in the fourth, has age 6, and p 5, which counts as 10. So p goes.
    served, _ = play_slots("ab abc uvwxyz ab p q r s t abm", kv_blocks=6, slots=9, ratio=2)
    assert served[-1] == (2, 2)


def test_a_request_too_large_is_rejected_and_changes_nothing() -> None:
    served, _ = play_slots("abc abcdef abcd", kv_blocks=4, slots=2)
    assert served == [(0, 0), None, (3, 3)]


def test_slots_take_exact_bytes_rounded_up_to_blocks() -> None:
    assert kv_blocks_beside(4096, 64, 1.58) == 4096 - 102  # 101.12
    assert kv_blocks_beside(10, 30, 0.1) == 7  # 30 * 0.1 is above 3 in floating point
    with pytest.raises(SettingsError, match="10 slots of 1 blocks leave none of 10 to KV"):
        kv_blocks_beside(10, 10, 1)


@pytest.mark.parametrize(
    ("rule", "slots", "named"),
    [
        (SlotRule("fifo"), 1, "unknown policy 'fifo'"),
        (SlotRule(interior_weight=1.5), 1, "interior-weight is 1.5"),
        (SlotRule(), 0, "checkpoint-slots is 0"),
        (SlotRule(), 9, "leave none of 9"),
    ],
)
def test_bad_settings_are_named(rule: SlotRule, slots: int, named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        replay_slots(PreorderTree.of(tree_of("ab")), 9, slots, rule)
