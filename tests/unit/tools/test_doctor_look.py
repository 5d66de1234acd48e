"""A look that does not come to an end: what it may use, and that a busy machine is no reason."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from statecache.tools import doctor_look
from statecache.tools.doctor_child import ExtensionFound
from statecache.tools.doctor_look import LookError, look


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Have a script run in the place of the child."""
    real = subprocess.Popen

    def run(script: str):
        file = tmp_path / "child.py"
        file.write_text(script)
        monkeypatch.setattr(
            doctor_look.subprocess,
            "Popen",
            lambda command, **more: real([sys.executable, str(file), *command[4:]], **more),
        )

    return run


def test_a_look_at_rest_is_ended(child) -> None:
    child("import time; time.sleep(10_000)")
    with pytest.raises(LookError, match=r"^no answer, and nothing done for 1 s$"):
        look("index", ExtensionFound, idle_seconds=1.0)


def test_a_look_that_uses_cpu_is_not_ended_however_long_it_takes(
    child, monkeypatch: pytest.MonkeyPatch
) -> None:
    child("""import os, time; time.sleep(1); os.write(1, b'{"file": "here"}')""")
    ticks = itertools.count()
    monkeypatch.setattr(doctor_look, "_ticks", lambda _pid: next(ticks))
    assert look("index", ExtensionFound, idle_seconds=0.05).file == "here"
    assert next(ticks) > 2


def test_a_look_may_use_so_much_cpu() -> None:
    code = (
        "from statecache.tools import doctor_child\n"
        "def forever():\n"
        "    while True: pass\n"
        "doctor_child._index = forever\n"
        "doctor_child.main('index', '1')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ
    )
    assert (done.returncode, done.stderr) == (1, "\nno answer within 1 s of CPU\n")


def test_what_is_used_is_that_of_the_process() -> None:
    assert doctor_look._ticks(os.getpid()) > 0
    assert doctor_look._ticks(2**31 - 1) == 0
