"""The driver `cache_layer`: an engine's cache layer without a model, in its own process."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from typing import IO, TYPE_CHECKING, TypeVar, cast

import msgspec

from statecache.ab.drivers.base import ArmError, Turn
from statecache.ab.drivers.cache_layer_protocol import Answer, Hello, Job
from statecache.engine.spec import engines
from statecache.errors import SettingsError, escape_control_chars

if TYPE_CHECKING:
    from collections.abc import Hashable

    from statecache.ab.arms import Arm
    from statecache.ab.drivers.base import Context
    from statecache.ab.results import Played
    from statecache.ab.trial import Cell

__all__ = ["CacheLayerDriver", "EngineProcess"]

_START_SECONDS = 300
_JOB_SECONDS = 900
_MOST_READ_BYTES = 1 << 20
_Said = TypeVar("_Said", Hello, Answer)


class CacheLayerDriver:
    """Plays the arms of one engine, which a Python of the user's has, in one process after another.

    A process that ended is started again for the next arm. `play` is called from one thread,
    `close` from any.
    """

    turn = Turn.IN_BACKGROUND

    def __init__(self, context: Context, key: Hashable) -> None:
        """`key` is that of the arms: engine and Python."""
        self.versions: dict[str, str] = {}
        self._replays = context.replays
        self._engine, self._python = cast("tuple[str, str | None]", key)
        self._process: EngineProcess | None = None
        self._closed = False

    def start(self) -> None:
        """Start the engine's process. Raises `SettingsError` if the engine is not there."""
        self._process = EngineProcess(self._engine, self._python)
        self.versions[self._engine] = self._process.version
        if self._closed:  # in the meantime
            self._process.close()

    def play(self, cell: Cell, arm: Arm, seed: int) -> Played:
        """Play the arm. Raises `ArmError`."""
        prompts = self._replays.of(cell.workload, seed).prompts
        if not self._closed and (self._process is None or not self._process.alive):
            self._end()
            try:
                self.start()
            except SettingsError as error:
                raise ArmError(str(error)) from error
        if self._closed or self._process is None:
            raise ArmError(f"{self._engine}: the test has ended")
        return self._process.play(arm, prompts)

    def close(self) -> None:
        """End the process, and start none any more."""
        self._closed = True
        self._end()

    def _end(self) -> None:
        if self._process is not None:
            self._process.close()


def _not_there(engine: str, python: str, problem: str) -> str:
    """Return what to do where `python` did not say hello for `engine`, by its last words."""
    missing = re.search(r"No module named '?([\w.]+)", problem)
    if missing and missing[1].startswith("statecache"):
        return f"{engine}: {python} has no statecache: install it there, beside {engine}"
    if missing and missing[1] == engine:
        return f"{engine}: {problem}: name a Python that has it with --python"
    return f"{engine}: does not load in {python} ({problem}): see docs/ab.md, or change --python"


class EngineProcess:
    """A process with one engine in it, started with that engine's Python.

    The terminal's Ctrl-C does not reach it: `close` ends it.
    """

    def __init__(self, engine: str, python: str | None) -> None:
        """Start it. Raises `SettingsError` if the engine is not there."""
        self._engine = engine
        self._said = b""
        self._within(_START_SECONDS)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close
        command = [python or sys.executable, "-m", engines()[engine].cache_driver or ""]
        try:
            self._process = subprocess.Popen(  # noqa: S603 - the Python the user named
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            self._log.close()
            raise SettingsError(
                escape_control_chars(f"{engine}: cannot start {command[0]} ({error.strerror})")
            ) from error
        try:
            self.version = self._read(Hello).version
        except ArmError as error:
            self.close()
            raise SettingsError(
                escape_control_chars(_not_there(engine, command[0], str(error)))
            ) from error
        except BaseException:
            self.close()
            raise

    def play(self, arm: Arm, prompts: list[list[int]]) -> Played:
        """Play the arm. Raises `ArmError`; look at `alive` afterwards."""
        self._within(_JOB_SECONDS)
        self._write(msgspec.json.encode(Job(arm, prompts)) + b"\n")
        answer = self._read(Answer)
        if answer.played is None:
            raise ArmError(escape_control_chars(f"{self._engine}: {answer.error}"))
        return answer.played

    @property
    def alive(self) -> bool:
        """Whether it can play another arm."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the process; once it is ended this does nothing."""
        self._kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        self._log.close()

    def _within(self, seconds: float) -> None:
        """Let what follows take so long, and no longer."""
        self._seconds = seconds
        self._end = time.monotonic() + seconds

    def _write(self, data: bytes) -> None:
        """Write to a process that may not read. Raises `ArmError` where it does not in time."""
        stdin = self._process.stdin
        if stdin is None:
            return
        left = memoryview(data)
        with suppress(BrokenPipeError):  # it is gone: reading says why
            os.set_blocking(stdin.fileno(), False)
            while left:
                self._wait([], [stdin])
                with suppress(BlockingIOError):
                    left = left[os.write(stdin.fileno(), left) :]

    def _read(self, kind: type[_Said]) -> _Said:
        stdout = self._process.stdout
        while stdout is not None and b"\n" not in self._said:
            self._wait([stdout], [])
            data = os.read(stdout.fileno(), _MOST_READ_BYTES)
            if not data:
                code = self._process.wait()
                raise ArmError(f"ended with status {code}{self._last_words()}")
            self._said += data
        line, _, self._said = self._said.partition(b"\n")
        try:
            return msgspec.json.decode(line, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._kill()
            raise ArmError(f"answers something else ({error})") from error

    def _wait(self, readable: list[IO[bytes]], writable: list[IO[bytes]]) -> None:
        left = max(0, self._end - time.monotonic())
        if not any(select.select(readable, writable, [], left)):
            self._kill()
            raise ArmError(f"no answer within {self._seconds:g} s{self._last_words()}")

    def _kill(self) -> None:
        """End it with all that it started itself; they hold its pipes too."""
        if self.alive:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()  # `alive` is false from here on

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f" ({lines[-1].strip()})" if lines else ""
