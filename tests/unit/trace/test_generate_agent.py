"""Generated workloads: well-formed, the same everywhere, and of the shape they claim."""

import hashlib
import json
import os
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise

import pytest

from statecache.errors import SettingsError
from statecache.trace.generate_agent import (
    MAX_CONTEXT_TOKENS,
    SYSTEM_PROMPTS_TOKENS,
    AgentWorkload,
    agent_lines,
)

WORKLOAD = AgentWorkload(sessions=40, turns=40, seed=3)


@pytest.fixture(scope="module")
def requests() -> list[dict]:
    return [json.loads(line) for line in agent_lines(WORKLOAD)]


def turns_of(requests: list[dict]) -> list[tuple[dict, dict]]:
    """Pairs of a session's prompt and its next one."""
    sessions = defaultdict(list)
    for request in requests:
        sessions[request["session_id"]].append(request)
    return [pair for turns in sessions.values() for pair in pairwise(turns)]


def shared_blocks(turn: dict, other: dict) -> int:
    pairs = zip(turn["hash_ids"], other["hash_ids"], strict=False)
    shorter = min(len(turn["hash_ids"]), len(other["hash_ids"]))
    return next((n for n, (a, b) in enumerate(pairs) if a != b), shorter)


def test_lines_are_well_formed_and_sorted_by_time(requests: list[dict]) -> None:
    times = [request["timestamp"] for request in requests]
    assert times == sorted(times)
    assert {request["session_id"] for request in requests} == set(range(40))
    for request in requests:
        assert len(request["hash_ids"]) == request["input_length"] // 512
        assert request["output_length"] > 0


def test_only_the_first_line_names_the_seed(requests: list[dict]) -> None:
    assert [request.get("seed") for request in requests[:2]] == [3, None]
    assert sum("seed" in request for request in requests) == 1


def test_sessions_share_a_few_system_prompts(requests: list[dict]) -> None:
    first_blocks = {request["hash_ids"][0] for request in requests}
    assert 2 <= len(first_blocks) <= len(SYSTEM_PROMPTS_TOKENS)


def test_about_seven_percent_of_turns_rewind(requests: list[dict]) -> None:
    turns = turns_of(requests)
    compacted = {tokens // 512 for tokens in SYSTEM_PROMPTS_TOKENS}
    shared = [(shared_blocks(turn, other), len(turn["hash_ids"])) for turn, other in turns]
    rewinds = sum(blocks < of and blocks not in compacted for blocks, of in shared)
    assert 0.05 < rewinds / len(turns) < 0.09


def test_contexts_grow_to_about_a_hundred_thousand_tokens(requests: list[dict]) -> None:
    longest = max(request["input_length"] for request in requests)
    assert 0.9 * MAX_CONTEXT_TOKENS < longest < MAX_CONTEXT_TOKENS + 512
    grown = sum(other["input_length"] > turn["input_length"] for turn, other in turns_of(requests))
    assert grown > 0.9 * len(turns_of(requests))


def test_sessions_interleave(requests: list[dict]) -> None:
    order = [request["session_id"] for request in requests]
    assert sum(a != b for a, b in pairwise(order)) > 0.8 * len(order)


def test_another_seed_is_another_workload() -> None:
    lines, other = (list(agent_lines(AgentWorkload(2, 3, seed))) for seed in (0, 1))
    assert lines != other


def test_the_bytes_stay_the_same_from_release_to_release() -> None:
    # Numbers are published by seed: this changes with the trace format alone, and is noted there.
    made = b"".join(agent_lines(AgentWorkload(sessions=8, turns=40, seed=1)))
    assert (
        hashlib.sha256(made).hexdigest()
        == "28bdec99c3535c426d07db848a894764ec41d9bf0328c6550575c7221d47821a"
    )


def test_hash_randomisation_changes_nothing() -> None:
    program = (
        "import sys; from statecache.trace.generate_agent import *;"
        "sys.stdout.buffer.writelines(agent_lines(AgentWorkload(4, 5, 6)))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
        ).stdout
        for seed in ("0", "1", "77")
    }
    assert outputs == {b"".join(agent_lines(AgentWorkload(4, 5, 6)))}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sessions": 0}, "sessions is 0"),
        ({"turns": 0}, "turns is 0"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_bad_settings_are_named(changes: dict[str, int], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        AgentWorkload(**changes)
