"""Waiting for what happens in another thread or process, and a clock that does not run."""

import time
from collections.abc import Callable

# Ends a hang, and nothing else: how busy a machine is must decide no test.
DEADLINE_SECONDS = 600


def wait_until(happened: Callable[[], object]) -> None:
    """Return once it is true; after ten minutes the test fails."""
    end = time.perf_counter() + DEADLINE_SECONDS
    while not happened():
        assert time.perf_counter() < end, f"it did not happen within {DEADLINE_SECONDS} s"
        time.sleep(0.02)


class Clock:
    """Stands in for the module `time` where times are taken; they pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now
