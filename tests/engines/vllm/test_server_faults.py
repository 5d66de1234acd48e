"""Faults under a real `vllm serve`: it goes on by itself, or ends with one line and status 2.

A fault is planted through a folder that Python searches first, in every process of the server.
"""

import json
import os
import re
import signal
import urllib.request
from pathlib import Path

import psutil
import pytest
import test_server
from engine import document, run, texts
from test_faults import broken_copy
from test_server import ask, serve, start

from statecache.trace.format import read_trace
from statecache_vllm.seam_table import TESTED
from support.exposition import read, wait_for
from support.waiting import DEADLINE_SECONDS, wait_for_lines

ON = ("--kv-cache-plugin", "statecache")
ROOM = ("--num-gpu-blocks-override", "250")
POOL = (*ON, *ROOM, "--statecache-checkpoints", "native", "--statecache-checkpoint-slots", "4")
PROMPTS = [document(number, 600) for number in (1, 1, 2, 3, 4, 5, 6, 1, 2)]

# The index loses a state and then fails, in the middle of the walk for a slot.
FAILING = """
from statecache import StateIndex
evict = StateIndex.evict
def failing(index, n):
    evict(index, n)
    raise KeyError("planted")
StateIndex.evict = failing
"""

AGAIN = """
import sys, statecache_vllm
def register():
    statecache_vllm.register()
    print("statecache: loaded again", file=sys.stderr)
"""


@pytest.fixture(scope="module")
def alone(model):
    """What vLLM says without the plugin."""
    with run(model, blocks=250) as engine:
        return texts(engine.ask(PROMPTS))


def failing_index(folder: Path) -> Path:
    (folder / "sitecustomize.py").write_text(FAILING)
    return folder


def loaded_twice_in_another_version(folder: Path) -> Path:
    """A second entry point of the same plugin, and a vLLM that nobody tried."""
    for name, version in (("again", "1"), ("vllm", "0.99.1+cpu")):
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        words = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (info / "METADATA").write_text(words)
        if name == "again":
            entry = "[vllm.general_plugins]\nstatecache_again = again:register\n"
            (info / "entry_points.txt").write_text(entry)
    (folder / "again.py").write_text(AGAIN)
    return folder


def segments(family: list[psutil.Process]) -> set[Path]:
    """The shared memory that these processes have open."""
    found: set[Path] = set()
    for process in family:
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        found |= {Path(name) for name in re.findall(r"/dev/shm/\S+", maps)}
    return found


def killed_while_it_answers(model, url: str, core: psutil.Process) -> list[str]:
    """Kill the engine core once a request has its first words; return what the client got."""
    body = {"model": str(model), "prompt": document(20, 276), "max_tokens": 700, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps({**body, "ignore_eos": True}).encode(),
        {"Content-Type": "application/json"},
    )
    lines = []
    with urllib.request.urlopen(request, timeout=DEADLINE_SECONDS) as reply:
        for line in reply:
            lines.append(line.decode().strip())
            if len(lines) == 1:
                core.send_signal(signal.SIGKILL)
    return [line for line in lines if line]


def name_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()).lower()
    except psutil.Error:  # it ended
        return ""


def test_a_failing_core_a_killed_one_and_a_restart(model, alone, tmp_path, monkeypatch):
    """The index fails: vLLM goes on. Its engine is killed: the server ends. It starts again."""
    monkeypatch.setattr(test_server, "PORT", test_server.free_port())
    url = f"http://127.0.0.1:{test_server.PORT}"
    record, log = tmp_path / "traffic.gz", tmp_path / "log"
    flags = (*POOL, "--statecache-record", str(record))
    (tmp_path / "failing").mkdir()
    with serve(model, log, *flags, path=failing_index(tmp_path / "failing")) as server:
        assert texts([ask(model, prompt) for prompt in PROMPTS]) == alone
        found = wait_for(url, lambda found: found["requests_total", ""] == len(PROMPTS))
        assert found["anomalies_total", ""] == 1
        assert found["active", "reuse+learned"] == 0
        assert found["checkpoint_stores_total", "native"] == 4
        (line,) = [
            entry
            for entry in log.read_text().splitlines()
            if " ERROR " in entry and ": " in entry and "statecache: " in entry
        ]
        assert line.endswith("statecache: an unexpected error; vLLM goes on by itself in its place")

        wait_for_lines(record, len(PROMPTS))
        family = psutil.Process(server.pid).children(recursive=True)
        (core,) = [process for process in family if name_of(process).startswith("vllm::enginecore")]
        held = segments(family)
        assert held
        got = killed_while_it_answers(model, url, core)
        _, alive = psutil.wait_procs(
            [psutil.Process(server.pid), *family], timeout=DEADLINE_SECONDS
        )
        assert not alive
    assert got[0].startswith('data: {"id":')
    assert json.loads(got[-2].removeprefix("data: "))["error"]["message"].startswith(
        "EngineCore encountered an issue."
    )
    assert got[-1] == "data: [DONE]"
    said = log.read_text()
    assert "EngineDeadError: EngineCore encountered an issue." in said
    assert said.count("statecache: an unexpected error") == 1
    assert not [segment for segment in held if segment.exists()]
    assert len(read_trace(str(record)).requests) == len(PROMPTS)

    path = loaded_twice_in_another_version(tmp_path / "twice")
    with serve(model, tmp_path / "log2", *flags, path=path):
        assert read(url)["requests_total", ""] == 0
        assert texts([ask(model, prompt) for prompt in PROMPTS]) == alone
        found = wait_for(url, lambda found: found["requests_total", ""] == len(PROMPTS))
        assert found["active", "reuse+learned"] == 1
        assert found["anomalies_total", ""] == 0
        assert found["requests_total", ""] == len(PROMPTS)
        assert found["prompt_tokens_total", ""] == sum(map(len, PROMPTS))
        assert found["hit_requests_total", ""] == 3
        assert found["checkpoint_stores_total", "native"] == 6
        wait_for_lines(tmp_path / "traffic.2.gz", len(PROMPTS))
    said = (tmp_path / "log2").read_text()
    warning = f"vLLM 0.99.1 was not tested (tested: {', '.join(TESTED)})"
    assert said.count(warning) == 1
    assert said.count("statecache: loaded again") >= 3  # one for each process
    assert len(read_trace(str(tmp_path / "traffic.2.gz")).requests) == len(PROMPTS)
    assert len(read_trace(str(record)).requests) == len(PROMPTS)


def test_what_a_server_cannot_start_with_is_one_line_and_status_2(model, tmp_path):
    """Three servers at once; each line is the last one, and nothing like a usage is before it."""
    old = broken_copy(tmp_path / "old", "_index", content=None)
    pool = (*ON, "--statecache-checkpoints", "native")
    starts = {
        "statecache: --statecache-int8-slots cannot be 'abc': use a number of states from 1 to ": (
            (*ON, "--statecache-int8", "--statecache-int8-slots", "abc"),
            None,
        ),
        "statecache: --statecache-checkpoint-slots: 1000000000 native checkpoints of ": (
            (*pool, "--statecache-checkpoint-slots", "1000000000"),
            None,
        ),
        "statecache: statecache._index does not load: reinstall statecache with pip in this Pyth": (
            ON,
            old,
        ),
    }
    servers = []
    for number, (flags, path) in enumerate(starts.values()):
        with (tmp_path / f"log{number}").open("w") as out:
            servers.append(start(model, out, *flags, path=path))
    try:
        assert [server.wait(DEADLINE_SECONDS) for server in servers] == [2, 2, 2]
    finally:
        for server in servers:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGKILL)
    for number, line in enumerate(starts):
        said = (tmp_path / f"log{number}").read_text()
        assert said.splitlines()[-1].startswith(line)
        assert said.count("statecache: ") == 1
        assert "Traceback" not in said
        assert "usage" not in said
