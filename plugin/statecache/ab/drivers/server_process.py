"""A server launched for a test: its port, its log, its memory, and its end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import psutil

from statecache.ab.drivers.interrupts import interrupts_put_off
from statecache.errors import escape_control_chars

if TYPE_CHECKING:
    from pathlib import Path

    from statecache.ab.server_arm import ServerArm

__all__ = ["MemoryWatch", "ServerProcess", "tree_bytes"]

_END_SECONDS = 20
_LOOK_SECONDS = 0.5
_LAST_LINES, _SHOWN_CHARACTERS = 3, 200


class ServerProcess:
    """Runs the command of an arm in a process group of its own, out of reach of Ctrl-C.

    `close` ends it.
    """

    def __init__(self, arm: ServerArm, log: Path) -> None:
        """Start it. Raises `SettingsError`: its port is in use, or there is no such command."""
        self._log = log
        self._arm = arm
        port = _free_port()
        self.url = arm.url or f"http://127.0.0.1:{port}"
        parts = urlsplit(self.url)
        if arm.url is not None and _answers(parts.hostname or "", parts.port or 80):
            raise arm.error(f"port {parts.port or 80} is in use")
        words = arm.words(port)
        with log.open("ab") as file:
            self._log_start = file.tell()
            try:
                self._process = subprocess.Popen(  # noqa: S603 - the command the user gave
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise arm.error(f"cannot start {words[0]} ({error.strerror})") from error
            except ValueError as error:  # a zero byte
                raise arm.error(f"cannot start {words[0]} ({error})") from error

    @property
    def pid(self) -> int:
        """The process of the command."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the command still runs."""
        return self._process.poll() is None

    def fate(self) -> str:
        """Return what became of it and its last words, on one line, to follow an error."""
        with self._log.open("rb") as file:
            file.seek(self._log_start)
            lines = self._arm.hidden(file.read().decode(errors="replace")).splitlines()
        last = [line.strip()[:_SHOWN_CHARACTERS] for line in lines if line.strip()][-_LAST_LINES:]
        ended = "" if self.alive else f"the server ended with status {self._process.returncode}; "
        return escape_control_chars(f"{ended}{self._log}: {' | '.join(last) or 'empty'}")

    def close(self) -> None:
        """Ask it to end, and end what is left of it and its children by force."""
        try:
            if self.alive:
                self._signal(signal.SIGTERM)
                end = time.monotonic() + _END_SECONDS
                while self.alive and time.monotonic() < end:
                    time.sleep(0.05)
        finally:  # children too, also when its parent is gone or the wait was interrupted
            with interrupts_put_off():
                self._signal(signal.SIGKILL)
                self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _answers(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), timeout=5):
        return True
    return False


def tree_bytes(pid: int) -> int | None:
    """Return the resident memory of a process, its session and all below it; None if it is gone.

    A page that several of them share counts in each.
    """
    resident: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    family: list[int] = []
    for process in psutil.process_iter(["ppid", "memory_info"]):
        with suppress(OSError):  # it ended
            if os.getsid(process.pid) == pid:
                family.append(process.pid)
        children.setdefault(process.info["ppid"], []).append(process.pid)
        memory = process.info["memory_info"]
        resident[process.pid] = memory.rss if memory else 0
    for member in family:  # which grows meanwhile
        family += [child for child in children.get(member, []) if child not in family]
    return sum(resident[member] for member in family) or None


class MemoryWatch:
    """Looks at a process tree twice a second, in a thread, from `start` to `stop`."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._most: int | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> int | None:
        """Look for the last time, and return the most there was, in bytes."""
        self._ended.set()
        self._thread.join()
        self._look()
        return self._most

    def _run(self) -> None:
        self._look()
        while not self._ended.wait(_LOOK_SECONDS):
            self._look()

    def _look(self) -> None:
        found = tree_bytes(self._pid)
        if found is not None:
            self._most = max(found, self._most or 0)
