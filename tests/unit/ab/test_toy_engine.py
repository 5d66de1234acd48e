"""A new engine is a package of its own: ab plays its cache layer, asks its server and offers it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.ab_servers import result_of
from support.replay_support import run

SPEC = """
from statecache.engine.spec import EngineCounters, EngineSpec

SPEC = EngineSpec(
    name="toy",
    title="Toy",
    plugin_group="toy.plugins",
    tested_versions=("1.0",),
    seams=(),
    version=lambda: "1.0",
    counters=EngineCounters(
        prefix="toy:", prompt_tokens="toy:prompt_tokens_total", hit_tokens="toy:hit_tokens_total"
    ),
    cache_driver="toy_adapter.driver",
    arms={"native": ("stock", "lru", "gds"), "int8": ("lru", "gds")},
    arm_admissions=("dense",),
    arm_keys=("states_per_path",),
    tuned={"few states": {"states_per_path": 2}},
    arms_note="Toy hits by its policy alone.",
)
"""
# Hits all blocks but the last with gds, half of them with a limit, and none with another policy.
DRIVER = """
from statecache.ab.drivers.cache_layer_protocol import answer_jobs
from statecache.ab.results import Played, Served


def play(job):
    hit = 2 * (job.arm.policy == "gds") or bool(job.arm.states_per_path)
    found = [Served.of_blocks(len(p), len(p), hit * (len(p) - 1) // 2) for p in job.prompts]
    return Played(found, 0, 0)


if __name__ == "__main__":
    answer_jobs(lambda: ("1.0", play))
"""
COUNTERS = """
from statecache.ab.drivers.server_metrics import counters_between, is_of_an_engine, read_counters

before = "toy:prompt_tokens_total 10\\n"
after = "toy:prompt_tokens_total 40\\ntoy:hit_tokens_total 9\\n"
assert is_of_an_engine(before)
found = counters_between(read_counters(before), read_counters(after), 30)
assert (found.source, found.prompt_tokens, found.hit_tokens) == ("toy", 30, 9), found
"""
TUNED = """
from statecache.ab.experiments import Experiment, engines_of

assert "toy" in engines_of("tuned")
arms = {arm.name: arm for arm in Experiment("tuned", "toy").cells()[0].arms}
assert list(arms)[:3] == ["toy alone", "toy alone, few states", "toy lru"], list(arms)
assert arms["toy alone, few states"].policy == "stock"
assert [name for name, arm in arms.items() if arm.states_per_path] == ["toy alone, few states"]
"""


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """An adapter as pip would leave it, in a folder on the path: the environment to run with."""
    package, about = tmp_path / "site" / "toy_adapter", tmp_path / "site" / "toy-1.0.dist-info"
    package.mkdir(parents=True)
    about.mkdir()
    (package / "__init__.py").write_text(SPEC)
    (package / "driver.py").write_text(DRIVER)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[statecache.engines]\ntoy = toy_adapter:SPEC\n")
    return {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "COLUMNS": "200"}


def test_its_cache_layer_is_played(installed: dict[str, str], tmp_path: Path) -> None:
    arms = [
        f"--arm={policy}:engine=toy,policy={policy},kv_tokens=512" for policy in ("stock", "gds")
    ]
    work = ("--workload", "agent:sessions=2,turns=2")
    done = run("ab", *arms, *work, "-o", "out", cwd=tmp_path, env=installed)
    assert done.returncode == 0, done.stderr
    result = result_of(tmp_path / "out")
    assert result["engines"] == {"toy": "1.0"}
    verdicts = {found["measure"]: found["verdict"] for found in result["comparisons"]}
    assert verdicts["token_hit_rate"] == "better"
    assert {found["hit_tokens"] == 0 for found in result["runs"] if found["arm"] == "stock"} == {
        True
    }


def test_a_key_that_it_offers_reaches_its_driver(installed: dict[str, str], tmp_path: Path) -> None:
    arms = [f"--arm=a{n}:engine=toy,policy=stock,kv_tokens=512,states_per_path={n}" for n in (0, 2)]
    done = run(
        "ab", *arms, "--workload=agent:sessions=2,turns=2", "-o", "out", cwd=tmp_path, env=installed
    )
    assert done.returncode == 0, done.stderr
    runs = result_of(tmp_path / "out")["runs"]
    assert {(found["arm"], found["hit_tokens"] > 0) for found in runs} == {
        ("a0", False),
        ("a2", True),
    }


def test_what_its_users_tune_is_an_arm_of_the_experiments(
    installed: dict[str, str], tmp_path: Path
) -> None:
    subprocess.run([sys.executable, "-c", TUNED], env=installed, cwd=tmp_path, check=True)


def test_it_is_named_in_the_help_and_refuses_what_it_cannot_do(
    installed: dict[str, str], tmp_path: Path
) -> None:
    assert "core, sglang, toy, vllm" in " ".join(run("ab", "--help", env=installed).stdout.split())
    arms = ["--arm=a:engine=toy,pool=shared,kv_tokens=512", "--arm=b:"]
    done = run("ab", *arms, cwd=tmp_path, env=installed)
    assert "arm a: engine toy has no pool 'shared'" in done.stderr


def test_the_counters_of_its_server_are_read(installed: dict[str, str], tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", COUNTERS], env=installed, cwd=tmp_path, check=True)
