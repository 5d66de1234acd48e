"""Each rule of GreedyDual-Size on a trace of under ten events, worked by hand.

The cost model is 1 second a token and nothing quadratic, so the gain of a state is its distance
in tokens to the nearest shallower state. L is the watermark.
"""

from collections.abc import Callable

import pytest

from statecache import CostModel, ReferenceCost, ReferenceIndex, StateIndex

Index = StateIndex | ReferenceIndex
Make = Callable[[str], Index]
A, B, C, D = 1, 2, 3, 4


@pytest.fixture(params=["native", "reference"])
def make(request: pytest.FixtureRequest) -> Make:
    if request.param == "native":
        return lambda policy: StateIndex(policy, CostModel(1, 0))
    return lambda policy: ReferenceIndex(policy, ReferenceCost(1, 0))


@pytest.fixture
def gds(make: Make) -> Index:
    return make("gds")


def test_ageing(gds: Index) -> None:
    gds.insert(A, 100)  # priority 0 + 100
    gds.insert(B, 10)  # 0 + 10
    assert gds.evict(1) == [B]  # L = 10
    gds.insert(C, 95)  # 10 + 95 = 105: cheaper than A to rebuild, but A has aged
    assert gds.watermark == 10
    assert gds.priority(C) == 105
    assert gds.evict(2) == [A, C]
    assert gds.watermark == 105


def test_watermark_never_falls(gds: Index) -> None:
    gds.insert(A, 50)
    gds.insert(B, 40, children=())
    gds.pin(B)
    assert gds.evict(1) == [A]  # L = 50; B was stamped at 0, so its priority is still 40
    gds.begin_walk()
    assert gds.next_victim() is None
    gds.end_walk()
    gds.unpin(B)  # stamped with 50
    assert gds.evict(1) == [B]
    assert gds.watermark == 90


def test_lower_priority_than_watermark_keeps_watermark(gds: Index) -> None:
    gds.insert(A, 50)
    gds.insert(B, 40)
    gds.begin_walk()
    assert gds.next_victim() == B
    assert gds.next_victim() == A
    gds.evicted(A)  # L = 50
    gds.evicted(B)  # 40 < 50
    gds.end_walk()
    assert gds.watermark == 50


def test_state_just_below_another_goes_first(gds: Index) -> None:
    gds.insert(A, 1_000)  # 1,000
    gds.insert(B, 1_010, parent=A)  # 10: A is next to it
    gds.insert(C, 500)  # 500
    assert gds.evict(3) == [B, C, A]


def test_only_state_of_a_long_chain_stays(gds: Index) -> None:
    gds.insert(A, 60_000)
    for short in range(100, 150):  # 50 short prompts pass through the one other slot
        gds.insert(short, 1_000)  # the n-th has priority 1,000 n
        assert gds.evict(1) == [short]
    assert gds.watermark == 50_000
    assert A in gds


def test_evicting_a_parent_raises_its_child(gds: Index) -> None:
    gds.insert(A, 10)  # 10
    gds.insert(B, 30, parent=A)  # 20
    gds.insert(C, 25)  # 25
    assert gds.priority(B) == 20
    assert gds.evict(1) == [A]
    assert gds.priority(B) == 30  # stamped at 0, now alone: must be computed from the start
    assert gds.evict(2) == [C, B]


def test_erasing_a_parent_raises_its_child_and_keeps_the_watermark(gds: Index) -> None:
    gds.insert(A, 10)
    gds.insert(B, 20, parent=A)
    gds.insert(C, 50, parent=B)  # 30
    gds.erase(B)
    assert gds.priority(C) == 40  # from A
    assert gds.watermark == 0
    assert gds.evict(2) == [A, C]


def test_inserting_above_lowers_the_state_below(gds: Index) -> None:
    gds.insert(B, 30)  # 30
    gds.insert(C, 25)  # 25
    gds.insert(A, 20, children=[B])  # 20, and B is now 10 from it
    assert gds.priority(B) == 10
    assert gds.evict(3) == [B, A, C]


def test_inserting_in_the_middle_of_a_chain(gds: Index) -> None:
    gds.insert(A, 10)
    gds.insert(D, 60, parent=A)  # 50
    gds.insert(C, 60, parent=A)  # 50, on another branch
    gds.insert(B, 40, parent=A, children=[D])  # 30; D becomes 20; C stays
    assert [gds.priority(s) for s in (A, B, C, D)] == [10, 30, 50, 20]
    assert gds.evict(1) == [A]  # B falls back to depth 0: 40; C: 60
    assert [gds.priority(s) for s in (B, C, D)] == [40, 60, 20]


def test_ties_go_to_the_least_recently_used(gds: Index) -> None:
    for state in (A, B, C):
        gds.insert(state, 10)
    gds.touch(A)
    assert gds.evict(3) == [B, C, A]


def test_pinned_state_is_no_victim_but_a_neighbour(gds: Index) -> None:
    gds.insert(A, 10)
    gds.pin(A)
    gds.pin(A)
    gds.insert(B, 15, parent=A)  # 5: A still counts
    assert gds.evict(2) == [B]  # L = 5
    gds.unpin(A)
    assert gds.evict(1) == []  # pinned twice
    gds.unpin(A)
    assert gds.priority(A) == 15  # the last unpin stamped it with 5
    assert gds.evict(1) == [A]


def test_pinning_does_not_stamp(gds: Index) -> None:
    gds.insert(A, 10)
    gds.insert(B, 10)
    gds.pin(A)
    gds.pin(B)
    gds.unpin(B)
    gds.unpin(A)  # last release later than B's
    assert gds.evict(2) == [B, A]


def test_never_used_state_leaves_in_the_end(gds: Index) -> None:
    gds.insert(A, 100)
    for n in range(1, 10):  # one other slot: the n-th newcomer of 10 tokens has priority 10 n
        gds.insert(100 + n, 10)
        assert gds.evict(1) == [100 + n]
    gds.insert(110, 10)  # priority 90 + 10: a tie, and A was used longer ago
    assert gds.evict(1) == [A]


def test_quadratic_cost_prefers_deep_states(make: Make) -> None:
    # 200,000 squared is 4e10 and 100,000 squared 1e10, both over 2e5: gains 150,000 and 50,000.
    index = (
        StateIndex("gds", CostModel(0, 1))
        if isinstance(make("gds"), StateIndex)
        else ReferenceIndex("gds", ReferenceCost(0, 1))
    )
    index.insert(A, 100_000)
    index.insert(B, 200_000, parent=A)
    assert index.priority(A) == 50_000
    assert index.priority(B) == 150_000
    assert index.evict(1) == [A]


def test_lru_knows_only_uses(make: Make) -> None:
    index = make("lru")
    index.insert(A, 60_000)
    index.insert(B, 10)
    index.insert(C, 20, parent=B)
    index.touch(B)
    index.pin(A)
    index.unpin(A)
    assert index.evict(3) == [C, B, A]
    assert index.watermark == 0


def test_walk_skips_what_was_not_confirmed(gds: Index) -> None:
    for state, depth in ((A, 10), (B, 20), (C, 30)):
        gds.insert(state, depth)
    gds.begin_walk()
    assert [gds.next_victim(), gds.next_victim()] == [A, B]
    gds.evicted(B)
    assert gds.next_victim() == C
    assert gds.next_victim() is None  # A was proposed once already
    gds.end_walk()
    assert gds.watermark == 20
    assert gds.evict(3) == [A, C]  # both still there, A with its old stamp


def test_proposal_that_is_pinned_meanwhile(gds: Index) -> None:
    gds.insert(A, 10)
    gds.begin_walk()
    assert gds.next_victim() == A
    gds.pin(A)
    with pytest.raises(ValueError, match="state 1 is pinned"):
        gds.evicted(A)
    gds.unpin(A)
    gds.evicted(A)
    gds.end_walk()
    assert len(gds) == 0


def test_proposal_touched_meanwhile_raises_the_watermark_to_what_it_is_then(gds: Index) -> None:
    gds.insert(A, 10)
    gds.insert(B, 30)
    gds.begin_walk()
    assert [gds.next_victim(), gds.next_victim()] == [A, B]
    gds.evicted(B)  # L = 30
    gds.touch(A)  # 30 + 10
    gds.evicted(A)
    gds.end_walk()
    assert gds.watermark == 40


def test_state_erased_and_inserted_again_is_new(gds: Index) -> None:
    gds.insert(A, 10)
    gds.begin_walk()
    assert gds.next_victim() == A
    gds.erase(A)
    gds.insert(A, 20)
    with pytest.raises(ValueError, match="state 1 was not proposed"):
        gds.evicted(A)
    assert gds.next_victim() == A
    gds.end_walk()
    assert gds.priority(A) == 20


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda i: i.insert(A, 99), ValueError, "state 1 is already resident"),
        (lambda i: i.insert(9, -1), ValueError, "state 9 has depth -1"),
        (lambda i: i.insert(9, 2**31), ValueError, "state 9 has depth 2147483648"),
        (lambda i: i.insert(9, 50, parent=8), KeyError, "state 8 is not resident"),
        (lambda i: i.insert(9, 10, parent=A), ValueError, "state 9.*shallower parent than state 1"),
        (lambda i: i.insert(9, 5, children=[8]), KeyError, "state 8 is not resident"),
        (lambda i: i.insert(9, 10, children=[A]), ValueError, "state 9 needs deeper children"),
        (lambda i: i.insert(9, 12, children=[B]), ValueError, "state 2.*hangs under another"),
        (lambda i: i.insert(9, 12, parent=A, children=[B, B]), ValueError, "state 9 lists.*twice"),
        (lambda i: i.touch(9), KeyError, "state 9 is not resident"),
        (lambda i: i.pin(9), KeyError, "state 9 is not resident"),
        (lambda i: i.unpin(9), KeyError, "state 9 is not resident"),
        (lambda i: i.unpin(A), ValueError, "state 1 is not pinned"),
        (lambda i: i.erase(9), KeyError, "state 9 is not resident"),
        (lambda i: i.priority(9), KeyError, "state 9 is not resident"),
        (lambda i: i.evict(-1), ValueError, "cannot evict -1"),
        (lambda i: i.evict(1.0), TypeError, "'float' object cannot be interpreted as an integer"),
        (lambda i: i.insert(2**63, 5), ValueError, "9223372036854775808 does not fit in 64 bits"),
        (lambda i: i.insert(9, 2**64), ValueError, "18446744073709551616 does not fit"),
        (lambda i: i.insert("9", 5), TypeError, "'str' object cannot be interpreted"),
        (lambda i: i.insert(9, 15, [A]), TypeError, "'list' object cannot be interpreted"),
        (lambda i: i.insert(9, 5, children=[None]), TypeError, "'NoneType' object cannot be"),
        (lambda i: i.insert(9, 5, children=A), TypeError, None),
        (lambda i: i.touch(None), TypeError, "'NoneType' object cannot be interpreted"),
        (lambda i: i.next_victim(), RuntimeError, "outside a walk"),
        (lambda i: i.evicted(A), RuntimeError, "outside a walk"),
        (lambda i: i.end_walk(), RuntimeError, "outside a walk"),
    ],
)
def test_bad_call_names_the_state_and_changes_nothing(
    gds: Index, call: Callable[[Index], None], error: type[Exception], message: str | None
) -> None:
    gds.insert(A, 10)
    gds.insert(B, 20, parent=A)
    with pytest.raises(error, match=message):
        call(gds)
    gds.check()
    assert len(gds) == 2
    assert gds.evict(5) == [A, B]  # 10, then B: stamp 0 + 20


def test_walks_do_not_nest(gds: Index) -> None:
    gds.insert(A, 10)
    gds.begin_walk()
    for call in (gds.begin_walk, lambda: gds.evict(1)):
        with pytest.raises(RuntimeError, match="inside a walk"):
            call()
    assert gds.next_victim() == A
    gds.evicted(A)
    gds.end_walk()
    gds.begin_walk()
    gds.end_walk()


def test_children_come_from_any_iterable_and_ids_from_any_integer(gds: Index) -> None:
    gds.insert(B, 20)
    gds.insert(True, 10, children=(s for s in [B]))
    assert gds.priority(B) == 10
    gds.insert(-(2**63), 30, parent=B)
    assert -(2**63) in gds
    for stranger in (None, "1", 1.5, 2**63):
        assert stranger not in gds


@pytest.mark.parametrize("cost", [CostModel, ReferenceCost])
@pytest.mark.parametrize("depths", [(-1, 5), (5, 4), (0, 2**31)])
def test_cost_of_no_stretch_is_refused(
    cost: type[CostModel | ReferenceCost], depths: tuple[int, int]
) -> None:
    with pytest.raises(ValueError, match="0 <= from_depth <= to_depth <= 2147483647"):
        cost().cost(*depths)


def test_unknown_policy(make: Make) -> None:
    with pytest.raises(ValueError, match="unknown policy 'mru': use gds"):
        make("mru")


@pytest.mark.parametrize("cost", [CostModel, ReferenceCost])
@pytest.mark.parametrize(
    ("linear", "quadratic", "message"),
    [
        (float("nan"), 1, "finite"),
        (1, float("inf"), "finite"),
        (-1, 1, "negative"),
        (0, 0, "not both be 0"),
        (1e300, 1e308, "too large"),
        (8e270, 0, "too large"),  # 2^31 tokens at 8e270 seconds are over 1e280
    ],
)
def test_bad_coefficients_are_refused(
    cost: type[CostModel | ReferenceCost], linear: float, quadratic: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        cost(linear, quadratic)


@pytest.mark.parametrize("cost", [CostModel, ReferenceCost])
def test_default_cost_by_hand(cost: type[CostModel | ReferenceCost]) -> None:
    # 1.862e-5 * 60,000 = 1.1172;  3.33e-6 * 3.6e9 / 2e5 = 0.05994
    assert cost().cost(0, 60_000) == pytest.approx(1.17714, rel=1e-12)
    # from 40,000: 1.862e-5 * 20,000 = 0.3724;  3.33e-6 * 2e9 / 2e5 = 0.0333
    assert cost().cost(40_000, 60_000) == pytest.approx(0.4057, rel=1e-12)
