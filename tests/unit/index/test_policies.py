"""What holds for every policy of the table, natively and in plain Python."""

import random
from collections.abc import Callable, Iterator

import pytest

from statecache import CostModel, ReferenceCost, _index
from statecache.index.interface import EvictionIndex
from statecache.index.policies import (
    BASELINE,
    DEFAULT,
    DEFAULT_WITHOUT_PROMPTS,
    ENGINE,
    POLICIES,
    REPLAY,
    PolicySpec,
    find_policy,
    make_index,
    policy_names,
    pool_policy_names,
    summaries,
)
from support.replay_support import replay_prompts

A, B, C, ABSENT = 1, 2, 3, 99
INDEXED = [spec for spec in POLICIES if spec.native is not None]


def forms() -> Iterator[tuple[str, PolicySpec, Callable[[], EvictionIndex]]]:
    for spec in INDEXED:
        yield f"{spec.name}-native", spec, lambda spec=spec: spec.native(CostModel(1, 0), None, 64)
        yield (
            f"{spec.name}-reference",
            spec,
            lambda spec=spec: spec.reference(ReferenceCost(1, 0), None, 64),
        )


FORMS = [pytest.param(spec, make, id=name) for name, spec, make in forms()]
every_form = pytest.mark.parametrize(("spec", "make"), FORMS)


def three_states(make: Callable[[], EvictionIndex]) -> EvictionIndex:
    """A and B below it, C beside them."""
    index = make()
    index.insert(A, 1024)
    index.insert(B, 2048, A, end=True)
    index.insert(C, 512, end=True)
    return index


def test_the_rows() -> None:
    names = [spec.name for spec in POLICIES]
    assert len(set(names)) == len(names)
    assert all(spec.summary and spec.runs_in <= {ENGINE, REPLAY} for spec in POLICIES)
    assert {BASELINE, DEFAULT_WITHOUT_PROMPTS, DEFAULT} <= set(policy_names(ENGINE))
    assert {BASELINE, DEFAULT_WITHOUT_PROMPTS} <= set(pool_policy_names())
    assert {spec.name for spec in INDEXED} == set(_index.POLICIES)
    assert all(f"{name}: " in summaries(REPLAY) for name in policy_names(REPLAY))


def test_an_unknown_name_is_answered_with_those_of_the_table() -> None:
    for look in (find_policy, lambda name: make_index(name, CostModel())):
        with pytest.raises(ValueError, match="'mru'") as caught:
            look("mru")
        assert all(spec.name in str(caught.value) for spec in POLICIES)
    with pytest.raises(ValueError, match="clairvoyant knows what comes later"):
        make_index("clairvoyant", CostModel())


@pytest.mark.parametrize("policy", policy_names(REPLAY))
def test_each_is_replayed(policy: str) -> None:
    row = replay_prompts([[1, 2], [3, 4], [1, 2, 5], [3, 4, 6], [1, 2, 7]], policy, 2)
    assert row.policy == policy
    assert 0 < row.hit_tokens <= row.resident_tokens


@every_form
def test_begins_empty_and_follows_itself(spec: PolicySpec, make) -> None:
    index = make()
    assert (index.policy, index.order, index.needs_prompts) == (
        spec.name,
        spec.name,
        spec.needs_prompts,
    )
    assert (len(index), index.watermark, index.ghosts, index.points) == (0, 0, 0, 0)
    assert index.evict(3) == []
    index.check()


@every_form
def test_every_state_goes_once_and_pinned_ones_never(spec: PolicySpec, make) -> None:
    del spec
    index = three_states(make)
    index.pin(B)
    assert sorted(index.evict(5)) == [A, C]
    assert B in index
    index.unpin(B)
    assert index.evict(5) == [B]
    assert len(index) == 0
    index.check()


@every_form
def test_the_lowest_rank_goes_first(spec: PolicySpec, make) -> None:
    del spec
    index = three_states(make)
    lowest = min(index.rank(state) for state in (A, B, C))
    going = three_states(make)
    assert going.evict(1)[0] in [state for state in (A, B, C) if index.rank(state) == lowest]


@every_form
def test_a_proposal_that_is_not_confirmed_stays(spec: PolicySpec, make) -> None:
    del spec
    index = three_states(make)
    index.begin_walk()
    first, second = index.next_victim(), index.next_victim()
    assert len({first, second, None}) == 3
    index.evicted(second)
    index.end_walk()
    assert (first in index, second in index) == (True, False)
    index.check()


@every_form
def test_states_are_erased_and_dropped_by_hand(spec: PolicySpec, make) -> None:
    del spec
    index = three_states(make)
    index.erase(A)
    index.drop([C, ABSENT])
    assert (len(index), B in index, index.watermark) == (1, True, 0)
    index.check()


@every_form
def test_a_prompt_changes_no_state_and_is_heard_only_where_it_is_needed(
    spec: PolicySpec, make
) -> None:
    index = three_states(make)
    before = index.points
    index.on_prompt([A, B, 4], [1024, 2048, 3072], 2, [A, B, 4])
    assert (len(index), index.points - before) == (3, 1 if spec.needs_prompts else 0)
    if spec.needs_prompts:
        with pytest.raises(ValueError, match="not below the one before it"):
            index.on_prompt([5, 6], [5, 5], 1, [6])
    else:
        index.on_prompt([5, 6], [5, 5], 1, [6])
    index.check()


@every_form
def test_errors_change_nothing(spec: PolicySpec, make) -> None:
    del spec
    index = three_states(make)
    for error, call in (
        (ValueError, lambda: index.insert(A, 10)),
        (ValueError, lambda: index.insert(4, -1)),
        (ValueError, lambda: index.insert(4, 1024, A)),
        (ValueError, lambda: index.insert(4, 600, None, [A, A])),
        (ValueError, lambda: index.unpin(A)),
        (ValueError, lambda: index.evict(-1)),
        (KeyError, lambda: index.touch(ABSENT)),
        (KeyError, lambda: index.rank(ABSENT)),
        (RuntimeError, index.next_victim),
        (RuntimeError, index.end_walk),
    ):
        with pytest.raises(error):
            call()
    assert len(index) == 3
    index.check()


@pytest.mark.parametrize("spec", INDEXED, ids=lambda spec: spec.name)
def test_both_forms_choose_the_same_victims(spec: PolicySpec) -> None:
    rng = random.Random(3)
    pair = (spec.native(CostModel(), 6, 4096), spec.reference(ReferenceCost(), 6, 4096))
    resident: list[int] = []

    def both(name: str, *args: object, **more: object) -> object:
        native, reference = (getattr(index, name)(*args, **more) for index in pair)
        assert native == reference, f"{name}{args}"
        return native

    for state in range(1, 600):
        depth = 16 * rng.randrange(1, 4_000)
        both("on_prompt", [state], [depth], 0, [state])
        both("insert", state, depth, end=rng.random() < 0.5)
        resident.append(state)
        both("touch", rng.choice(resident))
        if len(resident) > 6:
            (victim,) = both("evict", 1)
            resident.remove(victim)
        both("rank", rng.choice(resident))
        assert (
            len({(index.watermark, index.order, index.ghosts, index.points) for index in pair}) == 1
        )
