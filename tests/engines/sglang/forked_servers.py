"""Servers that share one import of SGLang: each is forked from a process that has it already.

One starts in a tenth of the time of `server.LAUNCH`: `running(..., **forked)` with the fixture
`forked`. As a script, this file is the process that forks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import server

_SECONDS = 0.1  # between two looks at a server that is to end


class Forked:
    """What `server.running` needs of a `Popen`, of a process that is another one's child."""

    def __init__(self, pid: int):
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            self.returncode = -1  # what it was, only its parent knows
        return self.returncode

    def wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < end:
            time.sleep(_SECONDS)


class Servers:
    def __enter__(self) -> Servers:
        self._parent = subprocess.Popen(
            [sys.executable, __file__],
            env=server.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def start(self, command: list[str], log: Path, variables: dict[str, str]) -> Forked:
        """Start one with the arguments in `command`; it is the first of its process group."""
        line = json.dumps([command, str(log), variables])
        self._parent.stdin.write(line + "\n")
        self._parent.stdin.flush()
        return Forked(int(self._parent.stdout.readline()))

    def __exit__(self, *_error: object) -> None:
        self._parent.stdin.close()
        self._parent.wait(server.READY_SECONDS)
        self._parent.stdout.close()


def _serve(arguments: list[str], log: str, variables: dict[str, str]) -> None:
    import multiprocessing

    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(out, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(variables)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    set_method = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda *_method, **_force: set_method("fork", force=True)
    sys.argv = ["launch_server", *arguments]

    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    run_server(prepare_server_args(arguments))


def main() -> None:
    import sglang.launch_server
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.scheduler
    import sglang.srt.models.qwen3_next
    import sglang.srt.models.qwen3_next_mtp  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that ended
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            try:
                _serve(*json.loads(line))
            finally:
                os._exit(1)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
