"""The ready-made experiments: what they compare, and the knee of the distinct prefixes."""

import pytest

from statecache.ab.bench import Bench
from statecache.ab.experiments import EXPERIMENTS, Experiment, engines_of
from statecache.ab.plans import trial_of
from statecache.ab.results import MEASURES


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_each_compares_on_each_of_its_engines_at_equal_bytes(name: str) -> None:
    engines = engines_of(name)
    asked = Experiment(name, ",".join(engines), "t.jsonl" if name == "agent-traces" else None)
    for cell in asked.cells():
        assert {arm.engine for arm in cell.arms} == set(engines)
        by_name = {arm.name: arm for arm in cell.arms}
        for pair in cell.pairs:
            baseline, arm = by_name[pair.baseline], by_name[pair.arm]
            assert baseline.engine == arm.engine or name == "engines"
            sizes = ("slots", "kv_tokens", "running", "state_blocks")
            assert all(getattr(baseline, size) == getattr(arm, size) for size in sizes)
        assert len(cell.pairs) >= len(engines)


@pytest.mark.parametrize("name", ["sessions", "one-pool"])
def test_a_part_of_the_engines_gets_the_seeds_of_all(name: str) -> None:
    """So the replay alone shows the numbers of README: 15 comparisons need 12 seeds, 5 only 10."""
    for engines in ("core", None, ",".join(engines_of(name))):
        assert Experiment(name, engines).repeats == 12


def test_what_has_no_seed_is_played_once() -> None:
    assert Experiment("distinct-prefixes").repeats == 1
    assert Experiment("agent-traces", trace="t.jsonl").repeats == 1


def test_the_knee_moves_from_256_prefixes_to_512() -> None:
    """A cycle of K prefixes hits always if K states fit, and never by lru if they do not.

    After the first round, which is the warm-up, two of three blocks of each prompt are a prefix.
    """
    asked = Experiment("distinct-prefixes")
    trial = trial_of(asked.cells(), asked.name, None, None, asked.warm_up, None, asked.axis)
    with Bench(trial) as bench:
        rates = {(run.cell, run.arm): MEASURES[0].of(run) for run, _ in bench.runs()}
    fits = {"core native": 256, "core int8": 512}
    assert rates == {
        (f"{count} prefixes", arm): pytest.approx(2 / 3 if count <= slots else 0)
        for count in (128, 256, 384, 512, 640, 768)
        for arm, slots in fits.items()
    }


def test_sessions_leave_fewer_slots_the_more_of_them_run() -> None:
    """419 slots less 5 for each of 16, 24, 32, 40 and 64 requests."""
    states = [{arm.states for arm in cell.arms} for cell in Experiment("sessions").cells()]
    assert states == [{339}, {299}, {259}, {219}, {99}]
