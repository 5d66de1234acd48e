"""Which of two arms is better, and can one tell? Needs numpy and scipy: the `ab` extra."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

import msgspec

from statecache.ab.results import MEASURES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from statecache.ab.results import Measure, Run

__all__ = [
    "ALPHA",
    "Comparison",
    "Pair",
    "compare",
    "default_repeats",
    "least_repeats",
]

ALPHA = 0.05
_RESAMPLES = 9_999
_MOST_EXACT = 16  # all 2 ** n ways to flip the signs are tried up to this n


class Pair(msgspec.Struct, frozen=True):
    """Two arms compared in one cell of a test."""

    cell: str
    baseline: str
    arm: str


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One measure of two arms.

    `difference` is the mean over pairs, arm less baseline, from `low` to `high` with 95 %
    confidence. `p` is corrected for all comparisons of this measure; the measures that servers
    alone have are corrected together. With one pair there is neither interval nor p, and the
    verdict is "exactly equal" or "different".
    """

    cell: str
    measure: str
    baseline: str
    arm: str
    pairs: int
    baseline_mean: float
    arm_mean: float
    difference: float
    low: float | None
    high: float | None
    p: float | None
    verdict: str


class _Tested(msgspec.Struct):
    pair: Pair
    measure: Measure
    baseline: list[float]
    arm: list[float]
    low: float | None = None
    high: float | None = None
    p: float | None = None

    @property
    def differences(self) -> list[float]:
        return [a - b for a, b in zip(self.arm, self.baseline, strict=True)]


def least_repeats(comparisons: int) -> int:
    """Return how many repeats so many comparisons need to be able to find anything.

    A paired sign test of n pairs has no p below 2 / 2 ** n, and the strictest of Holm's bounds is
    0.05 / comparisons.
    """
    return math.floor(math.log2(2 * max(1, comparisons) / ALPHA)) + 1


def default_repeats(comparisons: int, timed: int = 0) -> int:
    """Return how many repeats are run unless said otherwise: 8, or two above the least.

    At the least each single pair has to agree. `timed` of the comparisons are between two
    servers, which have several measures to be corrected for.
    """
    measures = sum(measure.family == "server" for measure in MEASURES)
    return max(8, least_repeats(max(comparisons, timed * measures)) + 2)


def compare(pairs: Sequence[Pair], runs: Sequence[Run], seed: int = 0) -> list[Comparison]:
    """Compare the runs of each pair of arms, paired by cell and seed, by every measure.

    Seeds and measures that only one of the two arms has are left out, also where one has them by
    request and the other from its counters, with the warm-up; a pair without a common seed is too.
    """
    by_arm: dict[tuple[str, str], dict[int | None, Run]] = {}
    for run in runs:
        by_arm.setdefault((run.cell, run.arm), {})[run.seed] = run
    families: dict[str, list[_Tested]] = {}
    for measure in MEASURES:
        tested = [_paired(pair, measure, by_arm) for pair in pairs]
        families.setdefault(measure.family, []).extend(test for test in tested if test.arm)
    found = [comparison for family in families.values() for comparison in _judged(family, seed)]
    order = {pair: place for place, pair in enumerate(pairs)}
    return sorted(found, key=lambda found: order[Pair(found.cell, found.baseline, found.arm)])


def _paired(
    pair: Pair, measure: Measure, by_arm: dict[tuple[str, str], dict[int | None, Run]]
) -> _Tested:
    baseline = by_arm.get((pair.cell, pair.baseline), {})
    arm = by_arm.get((pair.cell, pair.arm), {})
    tested = _Tested(pair, measure, [], [])
    for seed in (seed for seed in baseline if seed in arm):
        values = measure.of(baseline[seed]), measure.of(arm[seed])
        alike = measure.counted(baseline[seed]) == measure.counted(arm[seed])
        if alike and values[0] is not None and values[1] is not None:
            tested.baseline.append(values[0])
            tested.arm.append(values[1])
    return tested


def _judged(family: Sequence[_Tested], seed: int) -> list[Comparison]:
    several = [test for test in family if len(test.arm) > 1]
    for test in several:
        test.low, test.high = _interval(test.differences, seed)
        test.p = _sign_flip_p(test.differences, seed)
    # No flip of signs makes anything of differences that are all 0: they are no test.
    differing = [test for test in several if any(test.differences)]
    corrected = _holm([test.p for test in differing if test.p is not None])
    for test, p in zip(differing, corrected, strict=True):
        test.p = p
    return [
        Comparison(
            cell=test.pair.cell,
            measure=test.measure.name,
            baseline=test.pair.baseline,
            arm=test.pair.arm,
            pairs=len(test.arm),
            baseline_mean=math.fsum(test.baseline) / len(test.baseline),
            arm_mean=math.fsum(test.arm) / len(test.arm),
            difference=math.fsum(test.differences) / len(test.arm),
            low=test.low,
            high=test.high,
            p=test.p,
            verdict=_verdict(test),
        )
        for test in family
    ]


def _verdict(test: _Tested) -> str:
    if not any(test.differences):
        return "exactly equal"
    if test.low is None or test.high is None or test.p is None:
        return "different"
    if test.p >= ALPHA or test.low <= 0 <= test.high:
        return "not distinguishable"
    return "better" if (test.low > 0) == test.measure.higher_is_better else "worse"


def _interval(differences: Sequence[float], seed: int) -> tuple[float, float]:
    """Return the bootstrap interval of the mean."""
    import numpy
    from scipy import stats

    if len(set(differences)) == 1:
        return differences[0], differences[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # scipy's own; the result says it too
        found: Any = stats.bootstrap(
            (numpy.asarray(differences),),
            numpy.mean,
            n_resamples=_RESAMPLES,
            confidence_level=1 - ALPHA,
            method="BCa",
            rng=numpy.random.default_rng(seed),
        ).confidence_interval
    if math.isnan(found.low) or math.isnan(found.high):  # they differ by rounding alone
        return min(differences), max(differences)
    return float(found.low), float(found.high)


def _sign_flip_p(differences: Sequence[float], seed: int) -> float:
    """Return the p of a paired permutation test: is the mean difference that of random signs?"""
    import numpy
    from scipy import stats

    if not any(differences):
        return 1.0
    zeros = numpy.zeros(len(differences))
    found: Any = stats.permutation_test(
        (numpy.asarray(differences), zeros),
        lambda a, b, axis: numpy.mean(a - b, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=2 ** min(len(differences), _MOST_EXACT),
        rng=numpy.random.default_rng(seed),
    )
    return float(found.pvalue)


def _holm(p_values: Iterable[float]) -> list[float]:
    """Return the p values corrected by Holm's method, in the order given."""
    given = list(p_values)
    corrected = [0.0] * len(given)
    highest = 0.0
    for rank, place in enumerate(sorted(range(len(given)), key=given.__getitem__)):
        highest = max(highest, min(1.0, (len(given) - rank) * given[place]))
        corrected[place] = highest
    return corrected
