"""The command among other processes: streams, devices and pipes as files, signals, terminals."""

import json
import os
import pty
import signal
import subprocess
from pathlib import Path

import pytest

from support.replay_support import (
    COMMAND,
    SIGNALS,
    assert_one_line,
    run,
    with_default_signals,
    write_trace,
)
from support.waiting import DEADLINE_SECONDS, wait_until

PROMPTS = [[1, 2], [3, 4], [1, 2, 5], [3, 4, 6], [1, 2, 7]]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "small.jsonl", PROMPTS)


def shell(command: str, trace: Path) -> subprocess.CompletedProcess[str]:
    """Run a line of bash beside the trace; "$0" is the command, "$1" the trace."""
    return subprocess.run(
        ["/bin/bash", "-c", command, COMMAND, str(trace)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        cwd=trace.parent,
    )


@pytest.mark.parametrize(
    "command",
    [
        '"$0" replay "$1" --json /dev/stdout | cat',
        '"$0" replay "$1" --json /dev/stdout > f; cat f',
        '"$0" replay "$1" --json f > f; cat f',
        '"$0" replay "$1" --json /dev/fd/3 3>&1 >f; cat f',
        '"$0" replay "$1" --json /dev/fd/3 3>g >f; cat g f',
        'mkfifo p; cat p & "$0" replay "$1" --json p >f; wait; cat f',
        'ln -s /dev/stdout link; "$0" replay "$1" --json link',
    ],
)
def test_what_is_no_plain_file_is_written_as_it_stands(command: str, trace: Path) -> None:
    done = shell(command, trace)
    assert (done.returncode, done.stderr) == (0, "")
    document, table = done.stdout[: done.stdout.rindex("}\n") + 2], done.stdout.rpartition("}\n")[2]
    assert json.loads(document)["schema"] == "statecache.replay/1"
    assert table == run("replay", trace).stdout


def test_a_dash_is_stdout_in_place_of_the_table(trace: Path, tmp_path: Path) -> None:
    run("replay", trace, "--json", tmp_path / "out.json")
    assert run("replay", trace, "--json", "-").stdout == (tmp_path / "out.json").read_text()


def test_a_generated_trace_goes_to_dev_stdout(trace: Path) -> None:
    made = shell('"$0" generate agent --sessions 2 --turns 2 -o /dev/stdout | cat', trace)
    assert made.stdout == run("generate", "agent", "--sessions", 2, "--turns", 2, "-o", "-").stdout


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ('"$0" replay - <&-', 2, "statecache: stdin: cannot be read (it is closed)\n"),
        ('"$0" replay "$1" >&-', 0, ""),
        ('"$0" generate agent --sessions 2 -o - >&-', 0, ""),
        ('"$0" replay nope 2>&-', 2, ""),
        ('"$0" replay nope <&- >&- 2>&-', 2, ""),
        ('"$0" replay "$1" --json f 2>&- >&- && "$0" replay "$1" --json g && cmp f g', 0, ""),
    ],
)
def test_closed_streams(command: str, code: int, said: str, trace: Path) -> None:
    done = shell(command, trace)
    assert (done.returncode, done.stderr) == (code, said)


def test_a_stdin_that_does_not_wait_is_one_line() -> None:
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    done = run("replay", "-", stdin=ours)
    os.close(ours)
    os.close(theirs)
    assert_one_line(done, "stdin: cannot be read (it is non-blocking and has no data yet")


@pytest.mark.parametrize(
    "command",
    [
        '"$0" replay - --json "$1" <"$1"',
        '"$0" replay /dev/stdin --json "$1" <"$1"',
        'ln "$1" same; "$0" replay same --json "$1"',
    ],
)
def test_the_trace_is_known_by_any_name(command: str, trace: Path) -> None:
    before = trace.read_bytes()
    assert_one_line(shell(command, trace), "is the input itself")
    assert trace.read_bytes() == before


def test_a_folder_that_is_gone_is_named(trace: Path) -> None:
    command = 'mkdir d; cd d; rmdir ../d; "$0" replay "$1" --json o.json'
    assert_one_line(shell(command, trace), "--json: o.json cannot be written (No such file")


def test_devices_are_written_and_stay_devices(trace: Path) -> None:
    assert run("replay", trace, "--json", "/dev/null").returncode == 0
    assert Path("/dev/null").is_char_device()
    full = run("replay", trace, "--json", "/dev/full")
    assert_one_line(full, "--json: /dev/full cannot be written (No space left on device)")


def test_a_full_stdout_is_one_line(trace: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [COMMAND, "replay", str(trace)],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=DEADLINE_SECONDS,
        )
    assert done.returncode == 1
    assert done.stderr == b"statecache: output: No space left on device\n"


@pytest.mark.parametrize(
    "command",
    ['"$0" generate agent --sessions 20 -o - | head -n 1', '"$0" replay "$1" | head -n 0'],
)
def test_a_reader_that_leaves_causes_no_traceback(command: str, trace: Path) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", command, COMMAND, str(trace)],
        capture_output=True,
        timeout=DEADLINE_SECONDS,
    )
    assert done.stderr == b""


@pytest.mark.parametrize("number", SIGNALS)
def test_an_interrupt_writes_nothing(number: signal.Signals, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl.gz"
    out.write_text("earlier")
    process = subprocess.Popen(
        [COMMAND, "generate", "agent", "--sessions", "2000", "--turns", "200", "-o", str(out)],
        stderr=subprocess.PIPE,
        preexec_fn=with_default_signals,
    )
    wait_until(lambda: list(tmp_path.glob(".*.part")) or process.poll() is not None)
    process.send_signal(number)
    _, errors = process.communicate(timeout=DEADLINE_SECONDS)
    assert (process.returncode, errors) == (128 + number, b"")
    assert list(tmp_path.iterdir()) == [out]
    assert out.read_text() == "earlier"


def test_an_interrupt_while_loading_shows_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    done = run("--version", env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stderr) == (130, "")


def test_an_ignored_hangup_stays_ignored(tmp_path: Path) -> None:
    command = 'trap "" HUP; exec "$0" generate agent --sessions 300 --turns 60 -o out'
    process = subprocess.Popen(["/bin/sh", "-c", command, COMMAND], cwd=tmp_path)
    wait_until(lambda: list(tmp_path.glob(".*.part")) or process.poll() is not None)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=DEADLINE_SECONDS) == 0


def test_a_terminal_gets_progress_on_stderr(trace: Path) -> None:
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [COMMAND, "replay", str(trace), "--slots", "1,2,3"],
        stdout=subprocess.PIPE,
        stderr=theirs,
        timeout=DEADLINE_SECONDS,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(theirs)
    shown = os.read(ours, 100_000)
    os.close(ours)
    assert done.returncode == 0
    assert b"replay" in shown
    assert done.stdout.decode() == run("replay", trace, "--slots", "1,2,3").stdout
