"""An interior weight, worked by hand at a cost of 1 a token."""

from statecache import CostModel
from statecache.replay.weighted_gds import WeightedGds


def test_a_state_with_another_below_counts_its_gain_less() -> None:
    # 1 at 100 is worth 100 / 2, 2 below it 200 - 100. Evicting 1 raises the watermark to 50 and
    # leaves 2 worth 200; 3 is worth 50 + 120.
    states = WeightedGds(0.5, CostModel(1, 0))
    states.insert(1, 100)
    states.insert(2, 200, 1)
    assert (states.priority(1), states.priority(2)) == (50, 100)
    assert states.evict(1) == [1]
    states.insert(3, 120)
    assert (states.priority(2), states.priority(3)) == (200, 170)
    assert states.evict(9) == [3, 2]
    assert len(states) == 0


def test_with_nothing_below_any_more_it_counts_in_full_again() -> None:
    # 1: 0.1 * 100, with 2 gone 100: more than the 90 of 3.
    states = WeightedGds(0.1, CostModel(1, 0))
    states.insert(1, 100)
    states.insert(2, 150, 1)
    states.insert(3, 90)
    states.erase(2)
    assert states.evict(1) == [3]


def test_a_pinned_state_stays_and_is_stamped_when_unpinned() -> None:
    # 1 is worth 10, but held: 2 goes and raises the watermark to 20; then 1 is worth 30.
    states = WeightedGds(0.1, CostModel(1, 0))
    states.insert(1, 10)
    states.insert(2, 20)
    states.pin(1)
    assert states.evict(2) == [2]
    states.unpin(1)
    assert states.priority(1) == 30
