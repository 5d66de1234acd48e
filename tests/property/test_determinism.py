"""Decisions depend on the calls alone: not on the process, its hash seed or its addresses."""

from pathlib import Path

from support.hash_seeds import output_under_any_seed

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
    assert len(output_under_any_seed("-c", SCRIPT)) > 19_000


def test_four_processes_generate_and_replay_alike(tmp_path: Path) -> None:
    generate = ("generate", "agent", "--sessions", "8", "--turns", "10", "-o", "-")
    path = tmp_path / "agent.jsonl"
    path.write_text("\n".join(output_under_any_seed("-m", "statecache", *generate)) + "\n")
    policies = [arg for policy in ("lru", "gds", "clairvoyant") for arg in ("--policy", policy)]
    replay = ("replay", str(path), "--slots", "4,16", *policies)
    table = output_under_any_seed("-m", "statecache", *replay)
    assert len(table) == 2 + 2 * 3  # two lines of headings
