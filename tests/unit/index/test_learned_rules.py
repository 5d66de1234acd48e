"""The rules of `learned`, each on a few events, worked by hand.

The cost model is 1 second a token and nothing quadratic, so the gain of a state is its distance in
tokens to the nearest shallower state. A rank is the index of a bucket times the gain.

The table starts with its priors alone. A state that was the end of a prompt and has nothing below
it (role 0) is resumed with a chance of 1/4 a request below an age of 2 requests, by the prior of
that bucket, and then of 1/8, 1/16 ...: that of a bucket over the age at which it begins. Other ends
have 0.3 times the chance, what was no end 0.05 times.
"""

from collections.abc import Callable, Sequence

import pytest

from statecache import CostModel, LearnedReference, ReferenceCost, StateIndex
from statecache.index.learned_points import Points
from statecache.index.learned_table import LearnedTable, age_bucket, floor_log2, gittins
from statecache.index.shadow_reference import ShadowSelector

Index = StateIndex | LearnedReference
Make = Callable[..., Index]
A, B, C, D = 1, 2, 3, 4


@pytest.fixture(params=["native", "reference"])
def make(request: pytest.FixtureRequest) -> Make:
    if request.param == "native":
        return lambda slots=None, ghosts=4096: StateIndex("learned", CostModel(1, 0), slots, ghosts)
    return lambda slots=None, ghosts=4096: LearnedReference(ReferenceCost(1, 0), slots, ghosts)


def ask(index: Index, *path: tuple[int, int]) -> None:
    """Look up a prompt through these points; its last one is its end, and all are admitted."""
    keys, depths = [key for key, _ in path], [depth for _, depth in path]
    index.on_prompt(keys, depths, len(path) - 1, keys)


class Saved:
    """In the place of a shadow: the depths it resumes from, request by request."""

    def __init__(self) -> None:
        self.depths: list[int] = []

    def settle(self) -> int:
        return self.depths.pop(0)


def play(selector: ShadowSelector, savings: Sequence[tuple[int, int, int]]) -> None:
    for request in savings:
        for shadow, depth in zip(selector._shadows, request, strict=True):
            shadow.depths.append(depth)
        selector.settle()


def selector_of(savings: Sequence[tuple[int, int, int]]) -> ShadowSelector:
    cost = ReferenceCost(1, 0)
    selector = ShadowSelector(Points(), cost, 1, LearnedReference(cost))
    selector._shadows = [Saved(), Saved(), Saved()]
    play(selector, savings)
    return selector


def index_of(index: Index, state: int, gain: int) -> float:
    return index.rank(state) / gain


@pytest.mark.parametrize(
    ("age", "bucket"),
    [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (32_767, 14), (32_768, 15), (10**9, 15)],
)
def test_buckets_of_age(age: int, bucket: int) -> None:
    assert age_bucket(age) == bucket


def test_logarithms_are_those_of_whole_numbers() -> None:
    assert [floor_log2(n) for n in (0, 1, 2, 3, 4, 127, 128)] == [0, 0, 1, 1, 2, 6, 7]


def test_gittins_index_of_a_constant_chance_is_that_chance() -> None:
    """However long one waits, a half chance a request is a half chance a request."""
    assert gittins([0.5] * 4) == [0.5] * 4


def test_gittins_index_looks_past_a_poor_start() -> None:
    """Chance 1/4, then 1/2, in buckets 2 requests wide each.

    Resumed in the first bucket with 1 - (3/4)^2 = 7/16 after (7/16) / (1/4) = 7/4 requests; in the
    second, reached with 9/16, with 1 - (1/2)^2 = 3/4 after 3/2 requests. Stopping after the first:
    1/4. After both: (7/16 + 9/16 * 3/4) / (7/4 + 9/16 * 3/2) = (55/64) / (166/64) = 55/166.
    """
    assert gittins([0.25, 0.5]) == pytest.approx([55 / 166, 0.5], rel=1e-15)


def test_priors_order_the_roles() -> None:
    table = LearnedTable()
    # By the prior the chance falls with age, so it is best to stop at once: the index is the rate.
    # (0 + 1) / (0 + 1 / r0) with r0 = (0 + 0.5) / (0 + 0.5 / prior) = prior.
    assert table.index(0, 0, 0) == pytest.approx(0.25)
    assert table.index(0, 0, 3) == pytest.approx(0.25 / 8)
    assert table.index(1, 0, 0) == pytest.approx(0.25 * 0.3)
    assert table.index(3, 0, 0) == pytest.approx(0.25 * 0.05)


def test_a_rate_is_that_of_the_kind_held_to_that_of_its_role() -> None:
    table = LearnedTable()
    table.expose([(0, 1, 0)] * 2)  # two states, 16 requests each
    table.hit(0, 1, 0)
    table.rebuild()
    # Role: (1 + 0.5) / (32 + 0.5 / 0.25) = 1.5 / 34. Kind: (1 + 1) / (32 + 34 / 1.5) = 6 / 164.
    assert table._rates(0, 1)[0] == pytest.approx(6 / 164)
    assert table._rates(0, 2)[0] == pytest.approx(1.5 / 34)  # a kind without events: its role's
    for _ in range(25):  # of 16 requests each: 400, in which what was seen halves
        table.fade()
    # Role: (0.5 + 0.5) / (16 + 2) = 1 / 18. Kind: (0.5 + 1) / (16 + 18) = 1.5 / 34.
    assert table._rates(0, 1)[0] == pytest.approx(1.5 / 34)


def test_a_prompt_end_ranks_above_what_lies_between(make: Make) -> None:
    index = make()
    ask(index, (A, 8192), (B, 9216))
    index.insert(A, 8192)
    index.insert(B, 9216, A, end=True)
    # A: no end, one child: 0.25 * 0.05. B: an end without children: 0.25.
    assert index_of(index, A, 8192) == pytest.approx(0.0125)
    assert index_of(index, B, 1024) == pytest.approx(0.25)
    assert index.evict(1) == [A]  # 102.4 against 256: gds would have taken B
    assert index.watermark == 8192  # of gds, whichever order is active


def test_what_was_evicted_counts_for_the_state_above(make: Make) -> None:
    index = make()
    ask(index, (A, 512), (B, 1024))
    index.insert(A, 512)
    index.insert(B, 1024, A, end=True)
    assert index_of(index, A, 512) == pytest.approx(0.0125)
    index.pin(A)
    assert index.evict(1) == [B]
    index.unpin(A)
    # Its own, and the chance of B, which a hit on A would serve now.
    assert index_of(index, A, 512) == pytest.approx(0.0125 + 0.25)
    assert index.ghosts == 1
    index.insert(C, 512)
    assert index_of(index, C, 512) == pytest.approx(0.0125)  # nothing is below this one


def test_evicting_an_inheritor_passes_its_ghosts_on(make: Make) -> None:
    index = make()
    ask(index, (A, 512), (B, 1024), (C, 1536))
    for state, depth, above in ((A, 512, None), (B, 1024, A), (C, 1536, B)):
        index.insert(state, depth, above, end=state == C)
    index.pin(A)
    index.pin(B)
    assert index.evict(1) == [C]
    index.unpin(B)
    assert index.evict(1) == [B]
    assert index_of(index, A, 512) == pytest.approx(0.0125 + 0.25)  # B was no end of a prompt
    index.insert(B, 1024, A)  # back again: C is a ghost of its own
    assert index_of(index, A, 512) == pytest.approx(0.0125)
    assert index_of(index, B, 512) == pytest.approx(0.0125 + 0.25)


def test_age_lowers_the_rank(make: Make) -> None:
    index = make()
    ask(index, (A, 512))
    index.insert(A, 512, end=True)
    for _ in range(2):
        ask(index, (B, 512))
    # Two requests old: bucket 1, 0.25 / max(1, 2) = 1/8.
    assert index_of(index, A, 512) == pytest.approx(0.125)
    index.touch(A)
    assert index_of(index, A, 512) == pytest.approx(0.25)


def test_a_ghost_is_resumed_in_thought(make: Make) -> None:
    """Its age starts again although nothing is there, so its inheritor keeps its rank."""
    index = make()
    ask(index, (A, 512), (B, 1024))
    index.insert(A, 512)
    index.insert(B, 1024, A, end=True)
    index.pin(A)
    index.evict(1)
    index.unpin(A)
    ask(index, (D, 512))
    ask(index, (D, 512))
    # Two requests old, as A is: half of 0.25, and half of 0.0125.
    assert index_of(index, A, 512) == pytest.approx(0.125 + 0.00625)
    ask(index, (A, 512), (B, 1024), (C, 1536))  # would have resumed from B
    # C is only asked for: B is a ghost without children, its age 0.
    assert index_of(index, A, 512) == pytest.approx(0.25 + 0.00625)


def test_a_dropped_point_is_no_ghost_and_an_erased_one_is(make: Make) -> None:
    index = make()
    ask(index, (A, 512), (B, 1024), (C, 1536))
    for state, depth, above in ((A, 512, None), (B, 1024, A), (C, 1536, B)):
        index.insert(state, depth, above, end=state == C)
    index.drop([C, 99])
    assert (len(index), index.ghosts) == (2, 0)
    index.erase(B)
    assert (len(index), index.ghosts) == (1, 1)
    assert index.watermark == 0
    index.drop([B])
    assert (len(index), index.ghosts) == (1, 0)


def test_the_oldest_ghost_is_forgotten_first(make: Make) -> None:
    index = make(ghosts=1)
    ask(index, (A, 512), (B, 1024), (C, 1536))
    for state, depth, above in ((A, 512, None), (B, 1024, A), (C, 1536, B)):
        index.insert(state, depth, above, end=state == C)
    index.erase(C)
    assert index_of(index, B, 512) == pytest.approx(0.0125 + 0.25)
    index.erase(B)  # C, evicted before it, is forgotten
    assert index.ghosts == 1
    assert index_of(index, A, 512) == pytest.approx(0.0125)  # B's own, and A's


def test_the_same_rank_goes_by_gain_then_by_last_use(make: Make) -> None:
    index = make()
    ask(index, (A, 512))
    for state in (A, B, C):
        index.insert(state, 512, end=True)
    index.touch(A)
    assert index.evict(3) == [B, C, A]


def test_another_order_is_active_once_it_has_been_ahead_for_600_requests() -> None:
    """Savings of learned, gds and lru, request by request, in the plain form of the selector."""
    selector = selector_of([(0, 0, 100)] * 600)
    assert selector.order == "learned"
    play(selector, [(0, 0, 100)])
    assert selector.order == "lru"
    play(selector, [(10**6, 0, 0)])
    assert selector.order == "learned"  # at once
    # Learned leads by itself until lru has made up for the million: from then on it takes 600 more.
    assert selector_of([*[(0, 0, 100)] * 600, (10**6, 0, 0), (0, 0, 100)]).order == "learned"


def test_a_lead_of_one_percent_is_asked_for() -> None:
    assert selector_of([(1000, 0, 1009)] * 900).order == "learned"
    assert selector_of([(1000, 0, 1011)] * 900).order == "lru"


def test_what_was_ahead_once_and_is_no_longer_does_not_become_active() -> None:
    """Lru saves 1,000 a request 100 times, then learned 100 a request 600 times.

    In the long run, half in 2,048 requests, lru is still ahead: about 80,000 against 54,000. Of
    late, half in 128, it is behind after some 300: 77,400 * 0.19 = 14,700 against 18,500 * 0.81.
    """
    assert selector_of([*[(0, 0, 1000)] * 100, *[(100, 0, 0)] * 600]).order == "learned"


@pytest.mark.parametrize(
    "wrong",
    [
        ([A, B], [512], 1, [B]),
        ([A, B], [512, 512], 1, [B]),
        ([A, B], [512, 1024], 3, [B]),
        ([A, B], [512, 1024], -1, [B]),
        ([A, B], [512, 1024], 1, [B, A]),
        ([A, B], [512, 1024], 1, [C]),
        ([A, A], [512, 1024], 1, [A]),
        ([A], [1024], 0, [A]),
        ([A], [-1], 0, [A]),
    ],
)
def test_what_is_no_path_changes_nothing(make: Make, wrong: tuple[list[int], ...]) -> None:
    index = make()
    ask(index, (A, 512))
    with pytest.raises(ValueError, match=r"point|resumable|depths"):
        index.on_prompt(*wrong)
    assert index.points == 1


def test_a_state_is_its_point(make: Make) -> None:
    index = make()
    ask(index, (A, 512))
    with pytest.raises(ValueError, match="point 1 has depth 512, not 1024"):
        index.insert(A, 1024)
    assert len(index) == 0


def test_other_policies_ignore_what_learned_asks_for() -> None:
    index = StateIndex("gds", CostModel(1, 0), 5)
    ask(index, (A, 512), (B, 1024))
    index.insert(A, 512, end=True)
    index.insert(B, 1024, A)
    index.touch(A, end=True)
    assert (index.order, index.ghosts, index.points) == ("gds", 0, 0)
    assert index.rank(B) == 512
    index.drop([A, 77])
    assert len(index) == 1
    assert index.rank(B) == 1024


def test_prompt_ends_that_were_evicted_add_up(make: Make) -> None:
    """Three turns on A, each an end without anything below, are three chances to resume from A."""
    index = make()
    for key in (B, C, D):
        ask(index, (A, 512), (key, 1024))
    index.insert(A, 512)
    index.pin(A)
    for key in (B, C, D):
        index.insert(key, 1024, A, end=True)
    assert len(index.evict(3)) == 3
    index.unpin(A)
    # A, with three children and no end: 0.25 * 0.05.
    assert index_of(index, A, 512) == pytest.approx(0.0125 + 3 * 0.25)


def test_a_ghost_that_was_no_end_counts_for_the_best_alone(make: Make) -> None:
    index = make()
    for key in (B, C):
        ask(index, (A, 512), (key, 1024))
    index.insert(A, 512)
    index.pin(A)
    for key in (B, C):
        index.insert(key, 1024, A)
    assert len(index.evict(2)) == 2
    index.unpin(A)
    assert index_of(index, A, 512) == pytest.approx(0.0125)


def test_the_first_state_of_a_doubling_of_depth_is_spared(make: Make) -> None:
    """A chain at 512, 1,024, 1,536 and 2,048 tokens with its tip at 2,560; no prompt was seen.

    All gains are 512 and all ages 0, so the least recently used would go, the one at 512. It is the
    first at or beyond 512, that at 1,024 the first beyond 1,024 and that at 2,048 the first beyond
    2,048; the one at 1,536 is between and goes. Then each is the first of its doubling but the tip.
    """
    index = make()
    for state in range(1, 6):
        index.insert(state, 512 * state, state - 1 or None)
    assert index.evict(1) == [3]
    assert index.evict(1) == [1]


def test_a_short_chain_among_others_spares_nothing(make: Make) -> None:
    """The same chain is not the greater part of twelve states: four of five are in the chain."""
    index = make()
    for state in range(1, 6):
        index.insert(state, 512 * state, state - 1 or None)
    for state in range(11, 18):
        index.insert(state, 8192, None, end=True)
    assert index.evict(1) == [1]


def test_following_gds_takes_the_stamps_of_its_shadow(make: Make) -> None:
    """Shadows of two slots; the real index holds A, which gds keeps, and E, which it never had.

    B ranks above A under learned (256 against 102.4), not under gds, which evicts B at 1,024 and
    then C at 1,024 + 512 = 1,536 for the end of the third prompt. That one resumed from A, with
    gds alone, and so do 601 more, which set nothing. So the watermark is 1,536, with which A was
    stamped when its request ended, and E counts as used now.
    """
    index = make(slots=2)
    ask(index, (A, 8192), (B, 9216))
    index.insert(A, 8192)
    index.insert(6, 512)
    ask(index, (C, 512))
    index.on_prompt([A, D], [8192, 8704], 1, [D])
    for _ in range(600):
        index.on_prompt([A, 5], [8192, 8704], 1, [])
    assert (index.order, index.watermark, index.priority(6)) == ("learned", 0, 512)
    index.on_prompt([A, 5], [8192, 8704], 1, [])
    assert (index.order, index.watermark) == ("gds", 1536)
    assert index.priority(A) == 1536 + 8192
    assert index.priority(6) == 1536 + 512
    index.check()
