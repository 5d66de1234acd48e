"""Decisions depend on the calls alone: not on the process, its hash seed or its addresses."""

import subprocess
import sys
from pathlib import Path

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


def outputs_under_hash_seeds(*command: str) -> set[bytes]:
    return {
        subprocess.run(
            [sys.executable, *command],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "42", "random")
    }


def test_four_processes_give_identical_eviction_logs() -> None:
    (log,) = outputs_under_hash_seeds("-c", SCRIPT)
    assert len(log.splitlines()) > 19_000


def test_four_processes_generate_and_replay_alike(tmp_path: Path) -> None:
    generate = ("generate", "agent", "--sessions", "8", "--turns", "10", "-o", "-")
    (trace,) = outputs_under_hash_seeds("-m", "statecache", *generate)
    path = tmp_path / "agent.jsonl"
    path.write_bytes(trace)
    policies = [arg for policy in ("lru", "gds", "clairvoyant") for arg in ("--policy", policy)]
    replay = ("replay", str(path), "--slots", "4,16", *policies)
    (table,) = outputs_under_hash_seeds("-m", "statecache", *replay)
    assert len(table.splitlines()) == 2 + 2 * 3  # two lines of headings
