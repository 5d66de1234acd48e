"""Engines in processes of their own, played by scripts that die, hang, or answer what they like."""

import json
import subprocess
from pathlib import Path

import pytest

from statecache.ab.arms import Arm
from statecache.ab.bench import Bench
from statecache.ab.drivers import cache_layer as cache
from statecache.ab.drivers.base import ArmError
from statecache.ab.drivers.cache_layer import EngineProcess
from statecache.ab.trial import Cell, Trial
from statecache.ab.workloads import Workload
from support.replay_support import COMMAND, assert_one_line, run
from support.waiting import DEADLINE_SECONDS, wait_until

HELLO = """echo '{"version":"9.9"}'"""
SERVED = """echo '{"played":{"served":[[512,0,0,false]],"evicted_states":3,"skipped_states":0}}'"""


def engine(folder: Path, script: str) -> str:
    """An executable that takes the place of the Python of an engine."""
    path = folder / "python"
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)
    return str(path)


def arm(python: str, name: str = "s") -> Arm:
    return Arm(name=name, engine="sglang", kv_tokens=512, python=python)


def test_a_job_is_answered_and_closing_ends_the_process(tmp_path: Path) -> None:
    python = engine(tmp_path, f"{HELLO}; read job; {SERVED}; sleep 10000")
    process = EngineProcess("sglang", python)
    assert process.version == "9.9"
    played = process.play(arm(python), [[1]])
    assert (played.served[0].prompt_tokens, played.evicted_states) == (512, 3)
    assert process.alive
    process.close()
    process.close()
    assert not process.alive


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("read job; echo first >&2; echo boom >&2; exit 3", "ended with status 3 (boom)"),
        ("""read job; echo '{"error":"no KV"}'""", "sglang: no KV"),
    ],
)
def test_an_engine_that_fails_is_named_with_its_last_line(
    script: str, reason: str, tmp_path: Path
) -> None:
    python = engine(tmp_path, f"{HELLO}; {script}")
    process = EngineProcess("sglang", python)
    with pytest.raises(ArmError) as caught:
        process.play(arm(python), [[1]])
    assert str(caught.value) == reason
    process.close()


def test_an_engine_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_JOB_SECONDS", 0.5)
    python = engine(tmp_path, f"echo busy >&2; {HELLO}; sleep 10000")
    process = EngineProcess("sglang", python)
    with pytest.raises(ArmError, match=r"no answer within 0.5 s \(busy\)"):
        process.play(arm(python), [[1]])
    process.close()


@pytest.mark.parametrize("script", ["sleep 10000", "read -n 1 job; echo -n '{'; sleep 10000"])
def test_an_engine_that_reads_or_says_only_a_part_is_ended(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe holds 64 KiB, and the job has a megabyte; a line without its end is no answer."""
    monkeypatch.setattr(cache, "_JOB_SECONDS", 0.5)
    python = engine(tmp_path, f"{HELLO}; {script}")
    process = EngineProcess("sglang", python)
    job = [list(range(200_000))] if script.startswith("sleep") else [[1]]
    with pytest.raises(ArmError, match=r"no answer within 0.5 s"):
        process.play(arm(python), job)
    assert not process.alive
    process.close()


def test_a_long_job_and_a_long_answer_arrive_whole(tmp_path: Path) -> None:
    served = "[512,0,0,false]," * 20_000 + "[512,0,0,false]"
    said = f'{{"played":{{"served":[{served}],"evicted_states":null,"skipped_states":0}}}}'
    (tmp_path / "answer").write_text(f"{said}\n")
    python = engine(
        tmp_path,
        f"{HELLO}; read job; sleep 0.2; echo ${{#job}} >&2; cat {tmp_path}/answer; sleep 10000",
    )
    process = EngineProcess("sglang", python)
    played = process.play(arm(python), [list(range(200_000))])
    assert len(played.served) == 20_001
    assert int(process._last_words().strip(" ()")) > 200_000 * 6
    process.close()


NO_MODULE = "ModuleNotFoundError: No module named"
FAULTS = {
    "absent": ("No module named sglang", "sglang: ended with status 1 ({}): name a Python that"),
    "no kernels": (
        f"{NO_MODULE} 'sgl_kernel'",
        "sglang: does not load in {python} (ended with status 1 ({})): see docs/ab.md, or",
    ),
    "no library": (
        "ImportError: libcudart.so.12: cannot open",
        "sglang: does not load in {python} (ended with status 1 ({}))",
    ),
    "no plugin": (
        f"python: Error while finding module ({NO_MODULE} 'statecache_sglang')",
        "sglang: {python} has no statecache: install it there, beside sglang",
    ),
    "a module of its own": (
        f"{NO_MODULE} 'sglang.srt.new'",
        "sglang: does not load in {python} (ended with status 1 ({}))",
    ),
    "no colon": (
        "AssertionError",
        "sglang: does not load in {python} (ended with status 1 ({})): see docs/ab.md, or change",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_engine_that_does_not_start_is_one_line_that_fits(fault: str, tmp_path: Path) -> None:
    words, problem = FAULTS[fault]
    python = engine(tmp_path, f'echo "{words}" >&2; exit 1')
    arms = ("--arm", "a:", "--arm", f"b:engine=sglang,kv_tokens=512,python={python}")
    done = run("ab", *arms, cwd=tmp_path)
    assert_one_line(done, problem.format(words, python=python))
    assert list(tmp_path.iterdir()) == [Path(python)]


def test_the_other_arms_go_on_and_no_process_is_left(tmp_path: Path) -> None:
    python = engine(tmp_path, f"echo $$ >> pids; {HELLO}; read job; echo boom >&2; exit 3")
    done = run(
        *(
            "ab",
            "--arm",
            "a:policy=lru",
            "--arm",
            f"bad:engine=sglang,kv_tokens=512,python={python}",
        ),
        *("--arm", "b:policy=gds", "--workload", "agent:sessions=3,turns=3", "-o", "out"),
        cwd=tmp_path,
    )
    assert done.returncode == 0
    assert "agent, arm bad left out: ended with status 3 (boom)" in done.stderr
    result = json.loads((tmp_path / "out" / "result.json").read_bytes())
    assert [failure["arm"] for failure in result["failures"]] == ["bad"]
    assert len(result["runs"]) == 2 * 9  # nine repeats for two comparisons
    assert {comparison["arm"] for comparison in result["comparisons"]} == {"b"}
    for pid in (tmp_path / "pids").read_text().split():
        assert not Path(f"/proc/{pid}").exists()


def test_an_engine_that_cannot_be_started_again_is_left_out(tmp_path: Path) -> None:
    """It starts once and dies; the second arm on it then finds no engine."""
    python = engine(
        tmp_path,
        f"[ -e once ] && {{ echo full >&2; exit 4; }}; touch once; {HELLO}; read job; exit 3",
    )
    bad = f"engine=sglang,kv_tokens=512,python={python}"
    done = run(
        *("ab", "--arm", "a:", "--arm", "b:slots=1", "--arm", f"c:{bad}", "--arm", f"d:{bad}"),
        *("--workload", "agent:sessions=2,turns=2", "-o", "out"),
        cwd=tmp_path,
    )
    assert done.returncode == 0
    result = json.loads((tmp_path / "out" / "result.json").read_bytes())
    assert [
        (failure["arm"], failure["reason"].partition(":")[0]) for failure in result["failures"]
    ] == [
        ("c", "ended with status 3"),
        ("d", "sglang"),
    ]
    assert {comparison["arm"] for comparison in result["comparisons"]} == {"b"}


def test_once_closed_no_engine_is_started_for_the_arms_that_are_left(tmp_path: Path) -> None:
    """The thread of an engine that was ended hears of it as of one that died."""
    python = engine(tmp_path, f"{HELLO}; read job; exit 3")
    arms = [arm(python, name) for name in "ab"]
    cell = Cell(name="c", workload=Workload(sessions=1, turns=1), arms=arms)
    trial = Trial(name="t", cells=[cell], repeats=1)
    with Bench(trial) as bench:
        (driver,) = bench._drivers.values()
    for late in arms:
        with pytest.raises(ArmError, match="sglang: the test has ended"):
            driver.play(cell, late, 0)
    assert not driver._process.alive


def test_an_interrupt_ends_the_engines(tmp_path: Path) -> None:
    python = engine(tmp_path, f"echo $$ > pid; {HELLO}; read job; touch begun; sleep 10000")
    process = subprocess.Popen(
        [COMMAND, "ab", "--arm", "a:", "--arm", f"b:engine=sglang,kv_tokens=512,python={python}"],
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    wait_until((tmp_path / "begun").exists)
    process.terminate()
    assert process.wait(timeout=DEADLINE_SECONDS) == 128 + 15
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()
    result = json.loads((tmp_path / "statecache-ab" / "result.json").read_bytes())
    assert result["complete"] is False
