"""Verdicts: nothing is found where nothing is, a planted effect is, and both are said exactly."""

import random

import pytest

from statecache.ab import statistics
from statecache.ab.arms import parse_arm
from statecache.ab.bench import Bench
from statecache.ab.results import MEASURES, Run
from statecache.ab.statistics import Pair, compare, default_repeats, least_repeats
from statecache.ab.trial import Cell, Trial
from statecache.ab.workloads import Workload

PAIR = Pair("cell", "a", "b")


def run_with(arm: str, seed: int | None, hit_tokens: int, cell: str = "cell") -> Run:
    """One request of 100,000 tokens, all of them resident."""
    return Run(
        cell=cell,
        arm=arm,
        seed=seed,
        warm_up=0,
        requests=1,
        rejected=0,
        prompt_tokens=100_000,
        hit_tokens=hit_tokens,
        resident_tokens=100_000,
        missed_by_state_tokens=100_000 - hit_tokens,
        recompute_cost=1.0,
        evicted_states=0,
        skipped_states=0,
    )


def verdicts(a: list[int], b: list[int]) -> dict[str, str]:
    runs = [run_with("a", seed, hit) for seed, hit in enumerate(a)]
    runs += [run_with("b", seed, hit) for seed, hit in enumerate(b)]
    return {comparison.measure: comparison.verdict for comparison in compare([PAIR], runs)}


@pytest.fixture(scope="module")
def measured() -> list[int]:
    """Hit tokens of 100,000 of the built-in replay at the default 8 seeds, twice the same arm."""
    arm = parse_arm("a:policy=lru,slots=32")
    twin = parse_arm("b:policy=lru,slots=32")
    workload = Workload(kind="agent", sessions=8, turns=10)
    trial = Trial(name="aa", cells=[Cell(name="c", workload=workload, arms=[arm, twin])], repeats=8)
    with Bench(trial) as bench:
        runs = [run for run, _ in bench.runs()]
    assert {comparison.verdict for comparison in compare(trial.pairs, runs)} == {"exactly equal"}
    return [round(100_000 * r.hit_tokens / r.prompt_tokens) for r in runs if r.arm == "a"]


def test_an_effect_of_one_percent_is_found_at_the_default_repeats(measured: list[int]) -> None:
    """Seeds differ by far more than 1 %, but they are paired; noise of 0.3 % is on top."""
    assert max(measured) > 1.05 * min(measured)
    rng = random.Random(1)
    more = [round(hit * 1.01 * (1 + rng.uniform(-0.003, 0.003))) for hit in measured]
    assert verdicts(measured, more) == {
        "token_hit_rate": "better",
        "missed_by_state_tokens": "better",
        "recompute_cost": "exactly equal",
    }
    assert verdicts(more, measured)["token_hit_rate"] == "worse"


def test_noise_alone_is_not_distinguishable(measured: list[int]) -> None:
    """In 100 A/A tests with noise of 1 %, at most a few are called: 5 % are expected."""
    rng = random.Random(2)
    called = 0
    for _ in range(100):
        noisy = [[round(hit * (1 + rng.uniform(-0.01, 0.01))) for hit in measured] for _ in "ab"]
        called += verdicts(*noisy)["token_hit_rate"] != "not distinguishable"
    assert called <= 10


def test_one_pair_is_equal_or_different() -> None:
    assert verdicts([7], [7])["token_hit_rate"] == "exactly equal"
    assert verdicts([7], [8])["token_hit_rate"] == "different"
    (comparison, *_) = compare([PAIR], [run_with("a", None, 7), run_with("b", None, 8)])
    assert (comparison.low, comparison.high, comparison.p) == (None, None, None)


def test_the_least_p_of_n_pairs_and_holm_over_many() -> None:
    """Eight differences of one sign: 2 of the 256 ways to flip signs are as extreme, p 2/256.

    Of two comparisons Holm doubles the smaller; the other is 1: half of its signs are against it.
    """
    runs = [run_with(arm, seed, 50 + seed * (arm == "b")) for arm in "ab" for seed in range(1, 9)]
    assert compare([PAIR], runs)[0].p == pytest.approx(2 / 256)
    other = Pair("other", "a", "b")
    runs += [
        run_with(arm, seed, 50 + (-1) ** seed * (arm == "b"), "other")
        for arm in "ab"
        for seed in range(1, 9)
    ]
    found = [
        comparison
        for comparison in compare([PAIR, other], runs)
        if comparison.measure == "token_hit_rate"
    ]
    assert [comparison.p for comparison in found] == pytest.approx([4 / 256, 1])
    assert [comparison.verdict for comparison in found] == ["better", "not distinguishable"]


def test_constant_differences_have_an_interval_of_one_point() -> None:
    runs = [
        run_with(arm, seed, 1_000 * seed + 500 * (arm == "b")) for arm in "ab" for seed in range(8)
    ]
    (rate, *_) = compare([PAIR], runs)
    assert rate.difference == pytest.approx(0.005)
    assert rate.low == pytest.approx(0.005)
    assert rate.high == pytest.approx(0.005)


def test_differences_that_rounding_alone_keeps_apart_are_not_turned_around() -> None:
    """More missed tokens are worse: 9,472 a request in each of eight pairs, one off by 4e-12."""
    off = {4: 9471.999999999996}
    tested = statistics._Tested(
        PAIR, MEASURES[1], [0.0] * 8, [off.get(pair, 9472.0) for pair in range(8)]
    )
    (judged,) = statistics._judged([tested], 0)
    assert (judged.low, judged.high) == (off[4], 9472)
    assert (judged.measure, judged.verdict) == ("missed_by_state_tokens", "worse")


@pytest.mark.parametrize(
    ("comparisons", "least", "default"), [(1, 6, 8), (6, 8, 10), (7, 9, 11), (15, 10, 12)]
)
def test_repeats_reach_below_the_strictest_of_holms_bounds(
    comparisons: int, least: int, default: int
) -> None:
    """2 / 2 ** n < 0.05 / m: 2/64 < 0.05; 2/256 < 0.05/6 = 0.0083, but not < 0.05/7 = 0.0071."""
    assert least_repeats(comparisons) == least
    assert default_repeats(comparisons) == default
