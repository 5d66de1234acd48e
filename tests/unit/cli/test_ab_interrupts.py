"""An interrupt of `statecache ab` leaves complete files and no server."""

import dis
import gzip
import itertools
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import pytest

from statecache.ab.bench import Bench
from statecache.ab.drivers.server import Server
from statecache.ab.drivers.servers import Servers
from statecache.ab.server_arm import ServerArm, ServerSettings
from statecache.ab.trial import Cell, Trial
from statecache.ab.workloads import Workload
from support.ab_processes import gone
from support.ab_servers import ASKING, PROGRAM, plan, result_of
from support.replay_support import COMMAND, with_default_signals
from support.waiting import DEADLINE_SECONDS, wait_until


@pytest.mark.parametrize(
    ("when", "number", "code"),
    [
        ("while it starts", signal.SIGINT, 130),
        ("while it answers", signal.SIGINT, 130),
        ("while it answers", signal.SIGTERM, 128 + 15),
    ],
)
def test_an_interrupt_ends_the_servers_and_leaves_complete_files(
    when: str, number: signal.Signals, code: int, tmp_path: Path
) -> None:
    pids, asked, out = tmp_path / "pids", tmp_path / "asked", tmp_path / "out"
    slow = f"{PROGRAM} --pids {pids} --first-ms 50"
    second = f"{slow} --asked {asked}" if when == "while it answers" else "sleep 1000 {port}"
    second = f"/bin/sh -c 'echo $$ >> {pids}; exec {second}'"
    process = subprocess.Popen(
        [COMMAND, "ab", plan(tmp_path, a=slow, b=second), *ASKING, "--repeats", "10000", "-o", out],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=with_default_signals,
    )
    try:
        wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
        if when == "while it answers":
            # Two requests show that all is well; the third comes after the first run of arm a.
            wait_until(lambda: asked.exists() and asked.stat().st_size > 2)
        process.send_signal(number)
        _, errors = process.communicate(timeout=DEADLINE_SECONDS)
        was_gone = gone(pids)
    finally:
        process.kill()
        for pid in pids.read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    assert process.returncode == code
    assert was_gone
    if when == "while it starts":
        assert not (out / "result.json").exists()
        return
    *said, interrupted, results = errors.splitlines()
    assert any(line.startswith("arm b: tests 9.9, model stand-in, ready after ") for line in said)
    assert interrupted.startswith("statecache: interrupted after ")
    assert results.startswith("Results: ")
    result = result_of(out)
    assert (result["complete"], len(result["runs"]) > 0) == (False, True)
    raw = gzip.decompress((out / "requests.jsonl.gz").read_bytes()).splitlines()
    assert len(raw) == 12 * len(result["runs"])


@pytest.mark.parametrize("when", ["it is launched", "it is ended"])
def test_an_interrupt_leaves_no_server_that_nobody_knows_of(
    monkeypatch: pytest.MonkeyPatch, when: str, tmp_path: Path
) -> None:
    """It comes when the process runs and `Popen` has not returned, or before the last blow.

    The server does not end when it is asked to.
    """
    started: list[subprocess.Popen[bytes]] = []
    popen, killpg = subprocess.Popen, os.killpg

    def launched(*given: Any, **more: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*given, **more))
        if when == "it is launched":
            signal.raise_signal(signal.SIGINT)
        return started[-1]

    def killed(pid: int, number: int) -> None:
        if when == "it is ended" and number == signal.SIGKILL:
            signal.raise_signal(signal.SIGINT)
        killpg(pid, number)

    monkeypatch.setattr("statecache.ab.drivers.server_process.subprocess.Popen", launched)
    monkeypatch.setattr("statecache.ab.drivers.server_process.os.killpg", killed)
    monkeypatch.setattr("statecache.ab.drivers.server_process._END_SECONDS", 0.2)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    command = "/bin/sh -c 'trap \"\" TERM; sleep 1000; exit' {port}"
    arm = ServerArm(name="a", command=command, start_seconds=0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            Server(arm, ServerSettings(), tmp_path / "log", "").start(1)
        (process,) = started
        assert process.poll() is not None
    finally:
        signal.signal(signal.SIGINT, before)
        for process in started:
            with suppress(ProcessLookupError):
                killpg(process.pid, signal.SIGKILL)


RETURN = dis.opmap["RETURN_VALUE"]


class KnownServer:
    """Keeps which of its kind are up."""

    up: ClassVar[set["KnownServer"]] = set()
    served = None

    def __init__(self, *_: object) -> None:
        pass

    def start(self, _longest: int) -> None:
        self.up.add(self)

    def close(self) -> None:
        self.up.discard(self)


def test_an_interrupt_at_any_instruction_leaves_no_server_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """At the first instruction of what starts them, at the second, and so on, until all are up."""
    arms = [ServerArm(name=name, command="{port}") for name in "ab"]
    workload = Workload(kind="distinct-prefixes", count=2, rounds=2, loop="closed", at_once=1)
    trial = Trial(name="t", cells=[Cell(name="c", workload=workload, arms=arms)], repeats=1)
    monkeypatch.setattr("statecache.ab.drivers.servers.Server", KnownServer)
    monkeypatch.setattr(Servers, "_feeds", lambda *_: False)
    calls = (Bench.__enter__, Servers.__init__, Servers.start, Servers._start, KnownServer.start)
    starting = {call.__code__ for call in calls}
    most = 0
    for at in itertools.count():
        seen, reached = 0, False

        def traced(frame: FrameType, event: str, _: object, at: int = at) -> Any:
            nonlocal seen
            if frame.f_code not in starting:
                return None
            frame.f_trace_opcodes = True
            # No signal is looked at between leaving a `try` and returning.
            if event == "opcode" and frame.f_code.co_code[frame.f_lasti] != RETURN:
                seen += 1
                if seen > at:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return traced

        before = sys.gettrace()
        sys.settrace(traced)
        try:
            with Bench(trial, tmp_path):
                sys.settrace(None)
                assert len(KnownServer.up) == 2
            reached = True
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        most = max(most, seen)
        assert not KnownServer.up, f"instruction {at}"
        if reached:
            break
    assert most > 100
