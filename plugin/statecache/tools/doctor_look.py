"""Has `doctor_child` look at something in a process of its own, which may crash or never end."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TypeVar

import msgspec

from statecache.errors import escape_control_chars

__all__ = ["CPU_SECONDS", "IDLE_SECONDS", "LookError", "look"]

# A look costs some 15 s of CPU for an engine. It may use so much, and may be at rest for so long:
# on a busy machine it takes longer, and that is no reason to end it.
CPU_SECONDS = 300
IDLE_SECONDS = 300.0
_ASK_SECONDS = 5.0
_Found = TypeVar("_Found")


class LookError(Exception):
    """A look did not come to an end; the message is one line."""


def look(what: str, kind: type[_Found], idle_seconds: float = IDLE_SECONDS) -> _Found:
    """Return what `doctor_child` finds. Raises `LookError`."""
    command = [sys.executable, "-P", "-m", "statecache.tools.doctor_child", what, str(CPU_SECONDS)]
    with TemporaryFile() as out, TemporaryFile() as errors:
        child = subprocess.Popen(  # noqa: S603 - this Python
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=errors
        )
        try:
            code = _wait(child, idle_seconds)
        finally:
            child.kill()
            child.wait()
        if code == 0:
            return msgspec.json.decode(_read(out), type=kind)
        lines = _read(errors).decode(errors="replace").strip().splitlines()
    reason = escape_control_chars(lines[-1].strip()) if lines else "no word on stderr"
    if code < 0:
        raise LookError(f"crashed with signal {-code} ({reason})")
    raise LookError(reason)


def _wait(child: subprocess.Popen[bytes], idle_seconds: float) -> int:
    used, idle = -1, 0.0
    ask = min(_ASK_SECONDS, idle_seconds)
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(ask)
        before, used = used, _ticks(child.pid)
        idle = idle + ask if used == before else 0.0
        if idle >= idle_seconds:
            raise LookError(f"no answer, and nothing done for {idle_seconds:.0f} s")


def _ticks(pid: int) -> int:
    """Return the CPU a process and its children used, as the kernel counts; 0 if it cannot tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0
    return sum(int(field) for field in fields[11:15])


def _read(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()
