"""Four processes with different hash seeds evict the same slots in the same order."""

import subprocess
import sys
from pathlib import Path

from cache_layer import CORES
from server import environment

SCRIPT = Path(__file__).with_name("eviction_log.py")


def test_eviction_logs_are_identical_whatever_the_hash_seed():
    """Both cores: 1,000 requests in batches of one tick, and 300 operations."""
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", SCRIPT, *CORES],
            env=environment(PYTHONHASHSEED=seed),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for seed in ("0", "1", "2", "4294967295")
    ]
    done = [process.communicate(timeout=900) for process in running]
    assert [process.returncode for process in running] == [0] * 4, done[0][1].decode()[-2_000:]
    logs = {out for out, _ in done}
    assert len(logs) == 1
    lines = logs.pop().decode().splitlines()
    second = lines.index(CORES[1])
    assert lines[0] == CORES[0]
    assert min(second, len(lines) - second) > 300
