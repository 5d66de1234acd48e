"""Python run several times at once, each time with another hash seed."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from support.waiting import DEADLINE_SECONDS

SEEDS = ("0", "1", "42", "4294967295")


def output_under_any_seed(
    *command: str | Path, environment: Mapping[str, str] | None = None
) -> list[str]:
    """Return the lines that four processes write; fail where they differ, or one of them fails."""
    running = [
        subprocess.Popen(
            [sys.executable, *command],
            env={**(environment or {}), "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in SEEDS
    ]
    done = [process.communicate(timeout=2 * DEADLINE_SECONDS) for process in running]
    for process, (_, errors) in zip(running, done, strict=True):
        assert process.returncode == 0, errors[-2_000:]
    written = {output for output, _ in done}
    assert len(written) == 1, f"{len(written)} different outputs"
    return written.pop().splitlines()
