"""Waiting for what happens in another thread or process, and a clock that does not run."""

import gzip
import time
from collections.abc import Callable
from pathlib import Path

# Ends a hang, and nothing else: how busy a machine is must decide no test.
DEADLINE_SECONDS = 600


def wait_until(happened: Callable[[], object], every: float = 0.02) -> None:
    """Return once it is true, asked every so many seconds; after ten minutes the test fails."""
    end = time.perf_counter() + DEADLINE_SECONDS
    while not happened():
        assert time.perf_counter() < end, f"it did not happen within {DEADLINE_SECONDS} s"
        time.sleep(every)


def wait_for_lines(path: Path, count: int) -> None:
    """Return once a recording, packed or not, has so many lines; it is a second behind."""

    def lines() -> int:
        if not path.exists():
            return 0
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).count(b"\n")

    wait_until(lambda: lines() >= count)


class Clock:
    """Stands in for the module `time` where times are taken; they pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now
