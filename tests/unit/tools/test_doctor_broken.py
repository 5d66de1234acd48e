"""What the doctor says of an installation whose extensions are missing, broken or crash."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from support.doctored import INSTALLED, doctor, findings, planted


def test_a_broken_index_is_found_without_a_traceback(tmp_path: Path) -> None:
    path = planted(tmp_path, "_index", b"no library")
    done = doctor(path=path)
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    (line,) = [printed for printed in done.stdout.splitlines() if " index " in printed]
    assert line.startswith("PROBLEM index       the native index does not load: ImportError: ")
    assert line.endswith(": reinstall statecache with pip in this Python")


def test_any_other_command_on_a_broken_index_is_one_line(tmp_path: Path) -> None:
    path = planted(tmp_path, "_index", b"no library")
    command = [sys.executable, "-P", "-m", "statecache", "--version"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(path)}
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("statecache: statecache was installed without its native index")
    assert done.stderr.endswith(" (statecache doctor says more)\n")


def test_copies_that_do_not_load_are_a_problem(tmp_path: Path) -> None:
    done = doctor("--json", "-", path=planted(tmp_path, "_checkpoint_ops", b"no library"))
    level, text = findings(done)["checkpoints"]
    assert level == "problem"
    assert "are installed but do not load" in text


def test_an_index_that_crashes_is_named_with_the_signal(tmp_path: Path) -> None:
    """An extension built for another Python may take its process down: not the doctor's."""
    copy = tmp_path / "statecache"
    shutil.copytree(INSTALLED, copy, ignore=shutil.ignore_patterns("__pycache__"))
    child = copy / "tools" / "doctor_child.py"
    crash = 'if what == "index":\n        os.kill(os.getpid(), 11)\n    out = os.dup(1)'
    child.write_text(child.read_text().replace("out = os.dup(1)", crash))
    level, text = findings(doctor("--json", "-", path=tmp_path))["index"]
    assert level == "problem"
    assert f"crashed with signal {int(signal.SIGSEGV)} " in text
