"""The rules of `gds-tips` on a trace of under ten events, worked by hand.

The cost model is 1 second a token and nothing quadratic, so the gain of a state is the square root
of its distance in tokens to the nearest shallower state. L is the watermark.
"""

import pytest

from statecache import CostModel, ReferenceCost, StateIndex
from statecache.index.interface import EvictionIndex
from statecache.index.tips_reference import TipsReference

A, B, C, D = 1, 2, 3, 4


@pytest.fixture(params=["native", "reference"])
def tips(request: pytest.FixtureRequest) -> EvictionIndex:
    if request.param == "native":
        return StateIndex("gds-tips", CostModel(1, 0))
    return TipsReference(ReferenceCost(1, 0))


def path(tips: EvictionIndex) -> None:
    """A at 100, B at 500 and C at 525, each below the one before."""
    tips.insert(A, 100)
    tips.insert(B, 500, A)
    tips.insert(C, 525, B)


def priorities(tips: EvictionIndex, *states: int) -> list[float]:
    return [tips.priority(state) for state in states]


def test_the_gain_of_a_tip_and_of_the_state_above_it_is_a_square_root(tips: EvictionIndex) -> None:
    tips.insert(A, 100)
    assert priorities(tips, A) == [10]
    tips.insert(B, 500, A)
    assert priorities(tips, A, B) == [10, 20]


def test_the_middle_of_a_path_goes_first(tips: EvictionIndex) -> None:
    path(tips)
    assert priorities(tips, A, B, C) == [0, 20, 5]
    assert tips.evict(1) == [A]
    assert tips.watermark == 0
    assert tips.evict(2) == [C, B]  # 5, and the root of 500


def test_a_fork_is_not_in_the_middle_until_one_branch_is_gone(tips: EvictionIndex) -> None:
    tips.insert(A, 100)
    tips.insert(D, 200, A)
    tips.insert(B, 500, A)
    tips.insert(C, 525, B)
    assert priorities(tips, A, D, B) == [10, 10, 20]
    tips.erase(D)
    assert priorities(tips, A) == [0]


def test_it_counts_again_when_what_is_below_its_child_is_gone(tips: EvictionIndex) -> None:
    path(tips)
    tips.erase(C)
    assert priorities(tips, A, B) == [10, 20]


def test_a_state_set_between_two_others_may_be_in_the_middle(tips: EvictionIndex) -> None:
    """D at 244 is above B at 500 alone, which has C below: the root of 256 is 16."""
    path(tips)
    tips.insert(D, 244, A, [B])
    assert priorities(tips, A, D, B, C) == [0, 0, 16, 5]


def test_a_new_state_in_the_middle_makes_those_above_cheap_at_once(tips: EvictionIndex) -> None:
    """Its own key is a lower one too, wherever its heap entry was."""
    tips.insert(D, 9)  # 3
    tips.insert(A, 100)  # 10
    tips.insert(B, 500, A)
    assert tips.evict(1) == [D]  # L = 3
    tips.insert(C, 525, B)  # 3 + 5
    assert priorities(tips, A, B, C) == [0, 20, 8]
    assert tips.evict(1) == [A]
    assert tips.watermark == 3
