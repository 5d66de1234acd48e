"""A small workload of two sessions for the servers of both engines."""

import json
from pathlib import Path

import pytest

from statecache.ab.drivers import server
from statecache.ab.server_arm import ServerArm, ServerSettings
from statecache.ab.trial import Cell, Trial
from statecache.ab.workloads import Workload
from support.waiting import DEADLINE_SECONDS


def be_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give servers on a busy machine time to answer, and their counters to follow."""
    monkeypatch.setattr(server, "_REPLY_SECONDS", DEADLINE_SECONDS)
    monkeypatch.setattr(server, "_METRICS_READINGS", 1_000)


def trial_of(folder: Path, arms: list[ServerArm], repeats: int) -> Trial:
    """Each server asked what `conversations` has, 64 tokens a block and 4 in each answer."""
    return Trial(
        name="t",
        cells=[Cell(name="c", workload=conversations(folder), arms=arms)],
        repeats=repeats,
        warm_up=0,
        servers=ServerSettings(tokens_a_block=64, output_tokens=4, salt=7),
    )


def conversations(folder: Path) -> Workload:
    """Two sessions of four turns on one prefix of two blocks; each turn adds a block."""
    path = folder / "trace.jsonl"
    with path.open("w") as file:
        for turn in range(1, 5):
            for session in (100, 200):
                blocks = [1, 2, *range(session, session + turn)]
                line = {"session_id": session, "timestamp": turn, "output_length": 4}
                line |= {"input_length": 512 * len(blocks), "hash_ids": blocks}
                file.write(json.dumps(line) + "\n")
    return Workload(kind="trace", file=str(path), loop="closed", at_once=2)
