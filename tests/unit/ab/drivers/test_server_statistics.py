"""What is made of the answers of servers: quantiles, speed, and what cannot be told apart."""

import random

import msgspec
import pytest

from statecache.ab.results import Run
from statecache.ab.server_results import Answered, Answers
from statecache.ab.statistics import Pair, compare, default_repeats
from support.ab_servers import server_run


def answered(at: float, first: float, gap: float = 0.01, tokens: int = 3) -> Answered:
    pieces = [(first + gap * number, 1) for number in range(tokens)]
    return Answered(
        prompt_tokens=100,
        cached_tokens=50,
        output_tokens=tokens,
        asked_at=at,
        ended_at=at + pieces[-1][0],
        pieces=pieces,
    )


def test_quantiles_and_speed_of_a_run() -> None:
    """TTFT 0, 1, ... 100 ms after a warm-up of 9 s: its quantiles are its values."""
    found = [answered(0, 9), *(answered(1 + number, number / 1000) for number in range(101))]
    times = server_run("c", "a", 0, Answers(found), 1).times
    assert times is not None
    assert [times.ttft_p50_ms, times.ttft_p90_ms, times.ttft_p99_ms] == pytest.approx([50, 90, 99])
    assert times.ttft_quantiles_ms == pytest.approx(list(range(101)))
    assert (times.itl_p50_ms, times.itl_p99_ms) == pytest.approx((10, 10))
    # From 1 to 101.1 + 0.02 s, 3 tokens each.
    assert times.output_tokens_per_second == pytest.approx(303 / 100.12)
    assert times.request_errors == 0


def test_one_token_has_no_time_to_the_next() -> None:
    times = server_run("c", "a", 0, Answers([answered(0, 0.2, tokens=1)]), 0).times
    assert times is not None
    assert (times.ttft_p99_ms, times.itl_p50_ms, times.itl_p99_ms) == (200, None, None)


def noisy_run(arm: str, seed: int, rng: random.Random, slower: float = 1) -> Run:
    """Twenty requests whose times spread by half, in a run that is up to 2 % slower or faster."""
    pace = slower * rng.uniform(0.98, 1.02)
    found = [
        answered(at, pace * rng.uniform(0.05, 0.15), gap=pace * rng.uniform(0.01, 0.02))
        for at in range(20)
    ]
    return server_run("c", arm, seed, Answers(found), 0)


def test_one_server_against_itself_is_not_distinguishable() -> None:
    """Of 40 A/A tests of the default repeats 5 % may call a winner, by whichever measure: 2."""
    rng = random.Random(0)
    repeats = default_repeats(1, 1)
    assert repeats == 11
    called, measures = 0, set()
    for _ in range(40):
        runs = [noisy_run(arm, seed, rng) for seed in range(repeats) for arm in "ab"]
        found = compare([Pair("c", "a", "b")], runs)
        measures |= {comparison.measure for comparison in found}
        called += any(comparison.verdict in ("better", "worse") for comparison in found)
        for comparison in found:
            if comparison.measure in ("token_hit_rate", "request_errors"):
                assert comparison.verdict == "exactly equal"
    assert len(measures) == 8
    assert called <= 5


def test_a_slower_server_is_found_at_the_default_repeats() -> None:
    """By a fifth, where the median of 20 answers differs by about 6 % from run to run."""
    rng = random.Random(0)
    runs = [noisy_run("a", seed, rng) for seed in range(11)]
    runs += [noisy_run("b", seed, rng, slower=1.2) for seed in range(11)]
    verdicts = {
        comparison.measure: comparison.verdict
        for comparison in compare([Pair("c", "a", "b")], runs)
    }
    assert verdicts["itl_p50_ms"] == "worse"
    assert verdicts["token_hit_rate"] == "exactly equal"


def test_a_measure_of_one_arm_alone_is_not_compared() -> None:
    """A reports hits and b does not; the replay has no times."""
    a = server_run("c", "a", 0, Answers([answered(0, 0.1)]), 0)
    unreported = msgspec.structs.replace(answered(0, 0.1), cached_tokens=None)
    b = server_run("c", "b", 0, Answers([unreported]), 0)
    replayed = msgspec.structs.replace(a, arm="core", times=None)
    pairs = [Pair("c", "a", "b"), Pair("c", "a", "core")]
    measures = {
        (comparison.arm, comparison.measure) for comparison in compare(pairs, [a, b, replayed])
    }
    assert ("b", "ttft_p50_ms") in measures
    assert ("b", "token_hit_rate") not in measures
    assert {name for arm, name in measures if arm == "core"} == {"token_hit_rate"}
