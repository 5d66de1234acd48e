"""`statecache ab` in a process of its own: files, verdicts, interrupts and bad input."""

import gzip
import itertools
import json
import os
import re
import signal
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from statecache.ab.bench import Bench
from statecache.ab.report.result import Raw
from statecache.ab.workloads import SIZES
from statecache.cli.ab import ab_command
from support.replay_support import COMMAND, assert_one_line, run, with_default_signals, write_trace
from support.waiting import DEADLINE_SECONDS, wait_until

ARMS = ("--arm", "lru:policy=lru,slots=16", "--arm", "gds:policy=gds,slots=16")
SMALL = ("--workload", "agent:sessions=6,turns=6")


def requests_of(folder: Path) -> list[dict[str, object]]:
    packed = (folder / "requests.jsonl.gz").read_bytes()
    return [json.loads(line) for line in gzip.decompress(packed).splitlines()]


def test_two_runs_are_the_same_byte_for_byte_and_complete(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        done = run("ab", *ARMS, *SMALL, "-o", folder, cwd=tmp_path)
        assert done.returncode == 0
    for name in ("result.json", "requests.jsonl.gz", "report.html"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
    result = json.loads((folders[0] / "result.json").read_bytes())
    assert result["schema"] == "statecache.ab/1"
    assert result["complete"] is True
    assert [(summary["arm"], summary["seed"]) for summary in result["runs"]] == [
        (arm, seed) for seed in range(8) for arm in ("lru", "gds")
    ]
    assert result["seeds"] == {"agent": list(range(8))}
    raw = requests_of(folders[0])
    for summary in result["runs"]:
        mine = [r for r in raw if (r["arm"], r["seed"]) == (summary["arm"], summary["seed"])]
        counted = [r for r in mine if not r["warm_up"]]
        assert len(mine) - len(counted) == summary["warm_up"] == len(mine) // 10
        assert sum(int(str(r["hit_tokens"])) for r in counted) == summary["hit_tokens"]


def test_the_numbers_of_core_are_those_of_the_replay(tmp_path: Path) -> None:
    """One run a trace, since it has no seed: arms are different or exactly equal, no more."""
    trace = write_trace(tmp_path / "t.jsonl", [[1, 2], [3, 4], [1, 2, 5], [3, 4, 6], [1, 2, 7]])
    arms = ("--arm", "a:policy=lru,slots=2", "--arm", "b:policy=gds,slots=2,cost=1,0")
    work = f"trace:file={trace}"
    done = run("ab", *arms, "--workload", work, "--warm-up", 0, "-o", tmp_path / "out")
    assert done.returncode == 0
    result = json.loads((tmp_path / "out" / "result.json").read_bytes())
    run("replay", trace, "--slots", 2, "--policy", "lru", "--json", tmp_path / "r.json")
    (row,) = json.loads((tmp_path / "r.json").read_bytes())["rows"]
    (summary, _) = result["runs"]
    assert {found["verdict"] for found in result["comparisons"]} <= {"different", "exactly equal"}
    same = row.keys() & summary.keys()
    assert {"hit_tokens", "resident_tokens", "evicted_states", "recompute_cost"} <= same
    assert {name: summary[name] for name in same} == {name: row[name] for name in same}


def test_a_plan_is_read_from_toml_and_options_win(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(
        'name = "mine"\nrepeats = 1\nseed = 3\n[workload]\nkind = "shared-prefix"\ncount = 8\n'
        '[[arms]]\nname = "a"\nslots = 4\n[[arms]]\nname = "b"\nslots = 8\nbaseline = "a"\n'
    )
    done = run("ab", plan, "--seed", 5, "-o", tmp_path / "out")
    assert done.returncode == 0
    result = json.loads((tmp_path / "out" / "result.json").read_bytes())
    assert (result["settings"]["name"], result["seeds"]) == ("mine", {"shared-prefix": [5]})


def test_an_interrupt_leaves_complete_files(tmp_path: Path) -> None:
    work = ("--workload", "agent:sessions=40,turns=40", "--repeats", "5000")
    process = subprocess.Popen(
        [COMMAND, "ab", *ARMS, *work, "-o", str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        preexec_fn=with_default_signals,
    )
    try:
        # A packed file without a run in it has 40 bytes at most.
        wait_until(
            lambda: any(file.stat().st_size > 100 for file in (tmp_path / "out").glob(".*.part"))
        )
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=DEADLINE_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "interrupted after" in errors
    result = json.loads((tmp_path / "out" / "result.json").read_bytes())
    assert result["complete"] is False
    assert 0 < len(result["runs"]) < 10_000
    seen = {(request["arm"], request["seed"]) for request in requests_of(tmp_path / "out")}
    assert seen == {(summary["arm"], summary["seed"]) for summary in result["runs"]}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "result.json",
        "requests.jsonl.gz",
        "report.html",
    }


@pytest.mark.usefixtures("own_handlers")
@pytest.mark.parametrize("when", ["before it is packed", "half packed", "before it is counted"])
def test_an_interrupt_while_a_run_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The third run of eight: it is whole in both files, and nothing comes after it."""
    real_add, real_crc = Raw.add, zlib.crc32
    written = []

    def crc32(*given: Any) -> int:  # gzip calls it when the data has been packed
        if len(written) == 3 and when == "half packed":
            signal.raise_signal(signal.SIGINT)
        return real_crc(*given)

    def add(self: Raw, *given: Any) -> None:
        written.append(given)
        if len(written) == 3 and when == "before it is packed":
            signal.raise_signal(signal.SIGINT)
        real_add(self, *given)
        if len(written) == 3 and when == "before it is counted":
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Raw, "add", add)
    monkeypatch.setattr("gzip.zlib.crc32", crc32)
    with pytest.raises(KeyboardInterrupt):
        ab_command(arm=list(ARMS[1::2]), workload=SMALL[1], output=tmp_path)
    monkeypatch.undo()
    result = json.loads((tmp_path / "result.json").read_bytes())
    played = [(summary["arm"], summary["seed"]) for summary in result["runs"]]
    assert played == [("lru", 0), ("gds", 0), ("lru", 1)]
    assert result["complete"] is False
    assert {(request["arm"], request["seed"]) for request in requests_of(tmp_path)} == set(played)


@pytest.mark.usefixtures("own_handlers")
def test_a_fault_in_the_middle_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Bench.runs

    def runs(self: Bench) -> Iterator[Any]:
        yield from itertools.islice(real(self), 3)
        raise OSError("out of luck")

    monkeypatch.setattr(Bench, "runs", runs)
    with pytest.raises(OSError, match="out of luck"):
        ab_command(arm=list(ARMS[1::2]), workload=SMALL[1], output=tmp_path)
    result = json.loads((tmp_path / "result.json").read_bytes())
    assert (result["complete"], len(result["runs"])) == (False, 3)
    assert len({(request["arm"], request["seed"]) for request in requests_of(tmp_path)}) == 3


BAD = {
    "one arm": (["--arm", "a:slots=1"], "--arm: give two arms or more"),
    "no name": (["--arm", ":slots=1"], "is not name:key=value"),
    "no value": (["--arm", "a:slots"], "is not name:key=value"),
    "twice": (["--arm", "a:slots=1,slots=2"], "gives slots twice"),
    "same name": (["--arm", "a:", "--arm", "a:"], "arm a: the name is taken"),
    "engine": (["--arm", "a:engine=tgi"], "arm a: unknown engine 'tgi': use core, sglang, vllm"),
    "policy": (["--arm", "a:policy=fifo"], "arm a: unknown policy 'fifo': use lru, gds, learn"),
    "pool": (["--arm", "a:engine=sglang,pool=shared,kv_tokens=512"], "sglang has no pool 'shared'"),
    "field": (["--arm", "a:sluts=2"], "arm a: unknown key 'sluts': use slots"),
    "text": (["--arm", "a:slots=many"], "arm a: Expected `int`"),
    "chunk": (["--arm", "a:chunk=1000"], "arm a: chunk 1000 is no multiple of 512"),
    "running": (["--arm", "a:slots=10,running=2"], "arm a: 2 running requests need 10 slots"),
    "no kv": (["--arm", "a:engine=vllm"], "arm a: kv_tokens must be 512 or more here"),
    "blocks": (["--arm", "a:engine=vllm,kv_tokens=512,state_blocks=2"], "takes 3 blocks in vllm"),
    "cap": (
        ["--arm", "a:engine=vllm,kv_tokens=512,states_per_path=1"],
        "arm a: engine vllm has no limit on the states of a path: leave states_per_path out",
    ),
    "cap of the replay": (["--arm", "a:states_per_path=3"], "arm a: engine core has no limit on"),
    "cap below 0": (
        ["--arm", "a:engine=sglang,kv_tokens=512,states_per_path=-1"],
        "arm a: states_per_path -1 must be above -1 and below",
    ),
    "part": (
        ["--arm", "a:pool=shared,policy=fifo,kv_tokens=512,state_blocks=1.5"],
        "arm a: state_blocks 1.5 is no whole number",
    ),
    "slots": (["--arm", f"a:slots={2**64}"], f"a: slots {2**64} must be above 0 and below"),
    "int8 slots": (["--arm", "a:pool=int8,int8_ratio=1e14"], "256 slots hold too many int8 states"),
    "pool size": (
        ["--arm", f"a:pool=shared,policy=fifo,kv_tokens={2**40}"],
        "blocks are too many: give 10000000 at most",
    ),
    "cost": (["--arm", "a:cost=0,0"], "arm a: cost cannot be '0,0'"),
    "baseline": (["--arm", "a:", "--arm", "b:baseline=c"], "arm b: baseline 'c' is no arm"),
    "workload": ([*ARMS, "--workload", "chat"], "--workload: unknown kind 'chat'"),
    "workload field": (
        [*ARMS, "--workload", "agent:users=3"],
        "--workload: unknown key 'users': use kind, sessions, turns, loop, at_once, count, rounds",
    ),
    "of another kind": (
        [*ARMS, "--workload", "trace:file=x,turns=3"],
        "--workload: turns is no setting of trace",
    ),
    "workload size": ([*ARMS, "--workload", "agent:turns=0"], "turns is 0"),
    "stdin": ([*ARMS, "--workload", "trace:file=-"], "file is -: a workload is read more than"),
    "its stdin": (["--experiment", "agent-traces", "--trace", "-"], "file is -: a workload is"),
    "seed": (
        [*ARMS, "--workload", "distinct-prefixes:count=2", "--seed=-1"],
        "--seed: -1 is not in 0 to 9223372036854765808",
    ),
    "no file": ([*ARMS, "--workload", "trace"], "--workload: kind trace needs a file"),
    "no trace": ([*ARMS, "--workload", "trace:file=/nowhere"], "/nowhere: cannot be read"),
    "no talks": ([*ARMS, "--workload", "sharegpt:file=/nowhere"], "/nowhere: cannot be read"),
    "5 repeats": ([*ARMS, "--repeats", "5"], "--repeats: 5 can never reach significance in 1 comp"),
    "no repeats": ([*ARMS, "--repeats", "0"], "--repeats: 0 is not in 1 to 10000"),
    "warm-up": ([*ARMS, "--warm-up", "1"], "--warm-up: 1 is no share"),
    "no plan": (["/nowhere/plan.toml"], "/nowhere/plan.toml: cannot be read"),
    "experiment": (["--experiment", "magic"], "--experiment: unknown 'magic': use sessions"),
    "its engine": (["--experiment", "sessions", "--engines", "tgi"], "--engines: sessions does"),
    "engine of none": (
        ["--experiment", "engines", "--engines", "sgl"],
        "--engines: engines does not run on 'sgl': use sglang, vllm",
    ),
    "engine of another": (
        ["--experiment", "engines", "--engines", "core"],
        "--engines: engines does not run on 'core': use sglang, vllm",
    ),
    "one of two engines": (
        ["--experiment", "engines", "--engines", "sglang"],
        "--engines: engines compares sglang and vllm: leave it out",
    ),
    "no engines": (["--experiment", "sessions", "--engines", ""], "sessions does not run on ''"),
    "its trace": (
        ["--experiment", "agent-traces"],
        "--experiment: agent-traces plays a recorded trace: give --trace FILE",
    ),
    "a trace of none": (
        ["--experiment", "sessions", "--trace", "t"],
        "--trace: sessions makes its own workload: leave it out",
    ),
    "no engine to tune": (
        ["--experiment", "tuned", "--engines", "vllm"],
        "--engines: tuned does not run on 'vllm': use sglang",
    ),
    "both": ([*ARMS, "--experiment", "sessions"], "--experiment: brings its arms"),
    "engines of none": (
        [*ARMS, "--engines", ""],
        "--trace and --engines are for --experiment: see --workload, --arm",
    ),
    "long output": ([*ARMS, "-o", f"new/{'x' * 300}/out"], "cannot be made (File name too long)"),
    "back": ([*ARMS, "--workload", "trace:file=/nowhere", "-o", "new/../out"], "/nowhere: cannot"),
    "output": ([*ARMS, "-o", "/dev/null/x"], "--output: /dev/null/x cannot be made"),
    "no python": (
        ["--arm", "a:", "--arm", "b:engine=sglang,kv_tokens=512,python=/nowhere/python"],
        "sglang: cannot start /nowhere/python",
    ),
    "no python at all": (
        ["--arm", "a:", "--arm", "b:engine=vllm,pool=native,kv_tokens=512,python=/bin/echo"],
        "vllm: does not load in /bin/echo (answers something else (JSON is malformed",
    ),
    "no engine": (
        ["--arm", "a:", "--arm", "b:engine=vllm,pool=native,kv_tokens=512"],
        "vllm: ended with status 1",
    ),
}


BAD_PLANS = {
    "key": ("repeat = 3", "plan: unknown key 'repeat': use repeats"),
    "arm": ("[[arms]]\nname='lru'\npolcy='lru'", "arm lru: unknown key 'polcy': use policy"),
    "server": (
        "[[arms]]\nname='a'\nurl='http://h:1'\nxyz=1",
        "arm a: unknown key 'xyz': use name, driver, url, command, model, vocabulary",
    ),
    "type": ("[[arms]]\nname='a'\nslots='8'", "arm a: Expected `int`, got `str` - at `$.slots`"),
    "size": ("[[arms]]\nname='a'\nslots=0", "arm a: slots 0 must be above 0"),
    "workload": ("[workload]\nsesions=3", "workload: unknown key 'sesions': use sessions"),
    "turns": ("[workload]\nturns=0", "workload: turns is 0"),
    "no file": ("[workload]\nkind='trace'", "workload: kind trace needs a file"),
    "depth": (f"a={'[' * 500}{']' * 500}", "it is nested too deeply"),
    "speed": ("[servers]\nspeed='x'", "servers: Expected `float`, got `str` - at `$.speed`"),
    "below": ("[servers]\nspeed=-1", "servers: speed -1 must be above 0"),
    "servers": ("[servers]\ntokens_a_blok=3", "servers: unknown key 'tokens_a_blok': use tokens_a"),
}


@pytest.mark.parametrize("kind", BAD_PLANS)
def test_what_is_wrong_in_a_plan_is_named_with_its_file(kind: str, tmp_path: Path) -> None:
    text, problem = BAD_PLANS[kind]
    (tmp_path / "my.toml").write_text(text)
    done = run("ab", "my.toml", cwd=tmp_path)
    assert_one_line(done, f"my.toml: {problem}")


@pytest.mark.parametrize("kind", BAD)
def test_what_cannot_be_run_is_one_line_and_leaves_nothing(kind: str, tmp_path: Path) -> None:
    arguments, problem = BAD[kind]
    more = () if "-o" in arguments else ("-o", "new/out")
    env = {**os.environ, "PYTHONPATH": ""}
    done = run("ab", *arguments, *more, cwd=tmp_path, env=env)
    assert_one_line(done, problem)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_there_stays_after_a_refusal(tmp_path: Path) -> None:
    arguments, problem = BAD["no trace"]
    (tmp_path / "mine").mkdir()
    done = run("ab", *arguments, "-o", "mine/out", cwd=tmp_path)
    assert_one_line(done, problem)
    assert list((tmp_path / "mine").iterdir()) == []


def test_the_help_names_each_kind_of_workload_with_its_sizes() -> None:
    shown = " ".join(run("ab", "--help", env={**os.environ, "COLUMNS": "200"}).stdout.split())
    told = re.sub(r"[^\w-]+", " ", shown)
    for kind, sizes in SIZES.items():
        assert kind in told
        assert " ".join(sizes) in told
