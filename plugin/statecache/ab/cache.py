"""The driver `cache`: an engine's own cache layer without a model, in a process of its own."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import msgspec

from statecache.ab.engine_job import Answer, Hello, Job
from statecache.errors import SettingsError, on_one_line

if TYPE_CHECKING:
    from statecache.ab.arms import Arm
    from statecache.ab.records import Played

__all__ = ["ArmError", "EngineProcess"]

_START_SECONDS = 300
_JOB_SECONDS = 900
_Said = TypeVar("_Said", Hello, Answer)


class ArmError(Exception):
    """An arm could not be played; the message is one line. The other arms can go on."""


class EngineProcess:
    """A process with one engine in it, started with that engine's Python.

    It is out of reach of the terminal's Ctrl-C: whoever started it ends it with `close`.
    """

    def __init__(self, engine: str, python: str | None) -> None:
        """Start it. Raises `SettingsError` if the engine is not there."""
        self._engine = engine
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close
        command = [python or sys.executable, "-m", f"statecache_{engine}.cache_driver"]
        try:
            self._process = subprocess.Popen(  # noqa: S603 - the Python the user named
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                start_new_session=True,
            )
        except OSError as error:
            self._log.close()
            raise SettingsError(
                on_one_line(f"{engine}: cannot start {command[0]} ({error.strerror})")
            ) from error
        try:
            self.version = self._read(Hello, _START_SECONDS).version
        except ArmError as error:
            self.close()
            raise SettingsError(
                on_one_line(f"{engine}: {error}: name a Python that has it with --python")
            ) from error
        except BaseException:
            self.close()
            raise

    def play(self, arm: Arm, prompts: list[list[int]]) -> Played:
        """Play the arm. Raises `ArmError`; look at `alive` afterwards."""
        stdin = self._process.stdin
        try:
            if stdin is not None:
                stdin.write(msgspec.json.encode(Job(arm, prompts)) + b"\n")
                stdin.flush()
        except OSError:  # it is gone: reading says why
            pass
        answer = self._read(Answer, _JOB_SECONDS)
        if answer.played is None:
            raise ArmError(on_one_line(f"{self._engine}: {answer.error}"))
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

    def _read(self, kind: type[_Said], seconds: float) -> _Said:
        stdout = self._process.stdout
        if stdout is None or not select.select([stdout], [], [], seconds)[0]:
            self._kill()
            raise ArmError(f"no answer within {seconds} s{self._last_words()}")
        line = stdout.readline()
        if not line:
            code = self._process.wait()
            raise ArmError(f"ended with status {code}{self._last_words()}")
        try:
            return msgspec.json.decode(line, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._kill()
            raise ArmError(f"answers something else ({error})") from error

    def _kill(self) -> None:
        """End it with all that it started itself; they hold its pipes too."""
        if self.alive:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f" ({lines[-1].strip()})" if lines else ""
