"""Four processes with different hash seeds hand out the same blocks and slots in the same order."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("eviction_log.py")
KINDS = ("stock", "reuse", "pool")


def test_block_and_slot_logs_are_identical_whatever_the_hash_seed(model):
    """Each block policy and the checkpoint pool; 1,000 requests, eight a step, and more."""
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", SCRIPT, model, *KINDS],
            env={**os.environ, "PYTHONHASHSEED": seed, "VLLM_LOGGING_LEVEL": "ERROR"},
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
    starts = [lines.index(kind) for kind in KINDS]
    parts = [lines[a:b] for a, b in zip(starts, [*starts[1:], len(lines)], strict=True)]
    assert min(map(len, parts)) > 1_000
    assert len({tuple(part[1:]) for part in parts}) == 3
