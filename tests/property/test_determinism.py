"""Decisions depend on the calls alone: not on the process, its hash seed or its addresses."""

import subprocess
import sys

SCRIPT = """
import random
from statecache import StateIndex

rng = random.Random(11)
index = StateIndex("gds")
tips = {}
for turn in range(20_000):
    session = f"session-{rng.randrange(64)}"          # a string, so that its hash varies
    parent, depth = tips.get(session, (None, 0))
    if parent is not None and parent not in index:
        parent, depth = None, 0
    depth += rng.randrange(1, 4) * 512
    index.insert(turn, depth, parent)
    tips[session] = (turn, depth)
    for name in sorted(set(rng.sample(sorted(tips), min(3, len(tips))))):
        if tips[name][0] in index:
            index.touch(tips[name][0])
    if len(index) > 200:
        for victim in index.evict(5):
            print(victim, index.watermark.hex())
"""


def test_four_processes_give_identical_eviction_logs() -> None:
    logs = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "42", "random")
    }
    assert len(logs) == 1
    assert len(logs.pop().splitlines()) > 19_000
