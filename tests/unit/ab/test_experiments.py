"""The ready-made experiments: what they compare, and the knee of the distinct prefixes."""

import pytest

from statecache.ab.arms import Arm
from statecache.ab.bench import Bench
from statecache.ab.experiments import EXPERIMENTS, Experiment, engines_of
from statecache.ab.plans import trial_of
from statecache.ab.results import MEASURES
from statecache.ab.workloads import Workload
from statecache.index.policies import ENGINE, policy_names


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_each_compares_on_each_of_its_engines_at_equal_bytes(name: str) -> None:
    engines = engines_of(name)
    trace = None if EXPERIMENTS[name].trace == "none" else "t.jsonl"
    asked = Experiment(name, ",".join(engines), trace)
    for cell in asked.cells():
        assert {arm.engine for arm in cell.arms} == set(engines)
        by_name = {arm.name: arm for arm in cell.arms}
        for pair in cell.pairs:
            baseline, arm = by_name[pair.baseline], by_name[pair.arm]
            assert baseline.engine == arm.engine or name == "engines"
            sizes = ("slots", "kv_tokens", "running", "state_blocks")
            assert all(getattr(baseline, size) == getattr(arm, size) for size in sizes)
        assert len(cell.pairs) >= len(engines)


@pytest.mark.parametrize(("name", "repeats"), [("sessions", 14), ("one-pool", 12)])
def test_a_part_of_the_engines_gets_the_seeds_of_all(name: str, repeats: int) -> None:
    """So the replay alone shows the numbers of all: 60 comparisons need 14 seeds, 21 need 12.

    In `sessions` 2 of the replay, 8 of SGLang and 2 of vLLM at each of 5 sizes; in `one-pool` 4 and
    3 at each of 3. By themselves the 10 and 12 of the replay would need 11.
    """
    for engines in ("core", None, ",".join(engines_of(name))):
        assert Experiment(name, engines).repeats == repeats


@pytest.mark.parametrize("name", ["sessions", "agent-traces", "engines", "tuned"])
def test_what_is_tuned_is_the_engine_alone_in_as_many_bytes(name: str) -> None:
    """Each limit of SGLang's on the states of a path, in native states and in its own int8 pool."""
    trace = None if EXPERIMENTS[name].trace == "none" else "t.jsonl"
    for cell in Experiment(name, ",".join(engines_of(name)), trace).cells():
        tuned = [arm for arm in cell.arms if isinstance(arm, Arm) and arm.states_per_path]
        assert {(arm.engine, arm.policy) for arm in tuned} == {("sglang", "stock")}
        assert [(arm.pool, arm.states_per_path) for arm in tuned] == [
            (pool, states) for pool in ("native", "int8") for states in (1, 3, 8)
        ]


def test_tuned_plays_agents_and_the_beginning_of_a_trace() -> None:
    without = Experiment("tuned").cells()
    cells = Experiment("tuned", trace="t.jsonl").cells()
    assert [cell.at for cell in cells] == [32, 64, 128, 32, 64, 128]
    assert cells[:3] == without
    assert {cell.workload for cell in without} == {Workload(sessions=64, turns=40)}
    assert {cell.workload for cell in cells[3:]} == {
        Workload(kind="trace", file="t.jsonl", limit=1_500)
    }
    assert [arm.name for arm in cells[0].arms][:2] == ["sglang alone", "sglang alone, cap 1"]
    assert {(arm.policy, arm.pool) for arm in cells[0].arms[7:]} == {
        (policy, pool) for policy in policy_names(ENGINE) for pool in ("native", "int8")
    }


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
