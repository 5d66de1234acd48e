"""The file of a recording: its size, a full disk, a kill, a restart."""

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from statecache.errors import SettingsError
from statecache.trace.format import read_trace
from statecache.trace.record_file import check_record_file
from statecache.trace.recorder import Ended, TraceRecorder
from support.recordings import PROMPT, lines_of, recorder
from support.waiting import DEADLINE_SECONDS, wait_until


def test_the_file_has_a_most_size_and_stays_sound(path, caplog):
    """Each line has 1,000 ids of about 19 digits; 100 of them are 2 MB, packed about 1 MB."""
    caplog.set_level(logging.INFO)
    made = recorder(path, interval=0.01)
    for name in range(200):
        made.arrived(name)
        made.ended(name, Ended([name] * 512_000, 1))
        wait_until(lambda: not made.recording or made._told_tokens - made._seen_tokens < 2**24)
    wait_until(lambda: not made._thread.is_alive())
    made.arrived("late")
    made.ended("late", Ended(PROMPT, 1))
    made.close()
    assert 2**19 < path.stat().st_size <= 2**20
    assert 10 < len(read_trace(str(path)).requests) < 200
    ends = [r.getMessage() for r in caplog.records if "ends here" in r.getMessage()]
    assert ends == [f"statecache: the recording to {path} has reached 1 MiB and ends here"]


def test_a_full_disk_ends_the_recording_with_one_line(caplog):
    made = recorder(Path("/dev/full"), interval=0.01)
    for name in range(3):
        made.arrived(name)
        made.ended(name, Ended(PROMPT, 1))
    wait_until(lambda: not made._thread.is_alive())
    made.arrived("late")
    made.ended("late", Ended(PROMPT, 1))
    made.close()
    written = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert written == ["statecache: the recording to /dev/full ends here (No space left on device)"]


def test_part_of_a_chunk_that_did_not_fit_is_taken_back(tmp_path):
    """The disk is full after 100 bytes of a chunk: what was there before it stays sound."""
    code = f"""
import logging, resource, signal, sys, time
from statecache.trace.recorder import Ended, TraceRecorder
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
made = TraceRecorder({str(tmp_path / "t")!r}, 1, logging.getLogger("x"), interval=0.01)
made.arrived(0); made.ended(0, Ended([1] * 5120, 1))
while not (size := len(open({str(tmp_path / "t")!r}).read())): time.sleep(0.01)
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, size + 100))
for n in range(1, 50): made.arrived(n); made.ended(n, Ended([n] * 5120, 1))
made._thread.join({DEADLINE_SECONDS})
"""
    subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=DEADLINE_SECONDS, capture_output=True
    )
    assert [line["input_length"] for line in lines_of(tmp_path / "t")] == [5_120]


@pytest.mark.parametrize("name", ["traffic.jsonl", "traffic.jsonl.gz"])
def test_after_a_kill_the_file_is_sound(tmp_path, name):
    path = tmp_path / name
    code = f"""
import logging
from statecache.trace.recorder import Ended, TraceRecorder
made = TraceRecorder({str(path)!r}, 64, logging.getLogger("x"), interval=0.001)
n = 0
while True:
    n += 1
    made.arrived(n); made.ended(n, Ended([n % 7] * 5120, n))
"""
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        wait_until(lambda: path.exists() and path.stat().st_size > 100_000)
        process.send_signal(signal.SIGKILL)
    found = [line["output_length"] for line in lines_of(path)]
    assert len(found) > 100
    assert found == list(range(1, len(found) + 1))


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_what_ended_is_written_at_exit_also_of_a_child(tmp_path, method):
    path = tmp_path / "traffic"
    script = tmp_path / "script.py"
    script.write_text(f"""
import logging, multiprocessing
def child():
    from statecache.trace.recorder import Ended, TraceRecorder
    made = TraceRecorder({str(path)!r}, 1, logging.getLogger("x"), interval=100)
    made.arrived(1); made.ended(1, Ended([1] * 600, 5))
if __name__ == "__main__":
    process = multiprocessing.get_context({method!r}).Process(target=child)
    process.start(); process.join()
""")
    subprocess.run([sys.executable, script], check=True, timeout=DEADLINE_SECONDS)
    assert [line["output_length"] for line in lines_of(path)] == [5]


def recorded(made: TraceRecorder) -> None:
    made.arrived(1)
    made.ended(1, Ended(PROMPT, 1))
    made.close()


@pytest.mark.parametrize(
    ("name", "second", "third"),
    [
        ("traffic", "traffic.2", "traffic.3"),
        ("t.jsonl.gz", "t.2.jsonl.gz", "t.3.jsonl.gz"),
        (".hidden", ".hidden.2", ".hidden.3"),
    ],
)
def test_a_restarted_server_records_beside_what_is_there(tmp_path, caplog, name, second, third):
    caplog.set_level(logging.INFO)
    path = tmp_path / name
    path.write_bytes(b"precious")
    check_record_file(str(path))
    recorded(recorder(path))
    recorded(recorder(path))
    assert path.read_bytes() == b"precious"
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([name, second, third])
    assert [len(lines_of(tmp_path / file_name)) for file_name in (second, third)] == [1, 1]
    ids = [lines_of(tmp_path / file_name)[0]["hash_ids"] for file_name in (second, third)]
    assert not set(ids[0]) & set(ids[1])  # a key each
    begun = [r.getMessage() for r in caplog.records if "recording requests to" in r.getMessage()]
    assert begun == [
        f"statecache: recording requests to {tmp_path / file_name}, 1 MiB at most"
        for file_name in (second, third)
    ]


def test_an_empty_file_is_taken_unless_another_server_records_there(tmp_path):
    path = tmp_path / "traffic"
    path.touch()
    first = recorder(path)
    second = recorder(path)
    recorded(second)
    recorded(first)
    assert {file.name for file in tmp_path.iterdir()} == {"traffic", "traffic.2"}
    assert len(lines_of(path)) == len(lines_of(tmp_path / "traffic.2")) == 1
    recorder(path).close()
    recorder(path).close()
    assert {file.name for file in tmp_path.iterdir()} == {"traffic", "traffic.2", "traffic.3"}


def test_what_cannot_be_written_to_is_passed_over(tmp_path):
    path = tmp_path / "traffic"
    path.write_text("x")
    (tmp_path / "traffic.2").mkdir()
    os.mkfifo(tmp_path / "traffic.3")
    recorded(recorder(path))
    assert len(lines_of(tmp_path / "traffic.4")) == 1
    with pytest.raises(SettingsError, match="is there and no file: name another one"):
        recorder(tmp_path / "traffic.3")


def test_all_recordings_together_keep_to_the_size(tmp_path, caplog):
    """A MiB less 100 bytes is there: a line of three ids has no room, and the server goes on."""
    path = tmp_path / "traffic"
    path.write_bytes(b"x" * (2**20 - 100))
    for _ in range(3):
        made = recorder(path, interval=0.01)
        recorded(made)
        wait_until(lambda made=made: not made._thread.is_alive())
    assert (tmp_path / "traffic.2").stat().st_size == 0
    assert {file.name for file in tmp_path.iterdir()} == {"traffic", "traffic.2"}
    what = f"statecache: the recording to {tmp_path / 'traffic.2'} has reached 1 MiB"
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert said == [f"{what} with those before it and ends here"] * 3


@pytest.mark.parametrize("name", ["missing/traffic", "file/traffic", "x" * 300, "a\0b", "."])
def test_a_file_that_cannot_be_made_is_one_line(tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=r"^--statecache-record: ") as raised:
        check_record_file(os.path.join(tmp_path, name))  # noqa: PTH118 - keeps the null byte
    assert "\n" not in str(raised.value)
