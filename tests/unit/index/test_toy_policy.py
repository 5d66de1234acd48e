"""A new policy is one file and one row: it appears in replay, ab, help and plot without an edit."""

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest

from statecache.ab.arms import parse_arm
from statecache.ab.drivers.trace_replay import TraceReplay
from statecache.ab.experiments import Experiment
from statecache.cli.plot import _figure
from statecache.engine.settings import Settings, add_flags
from statecache.errors import SettingsError
from statecache.index import policies
from statecache.replay.online import ShadowReplay
from support.replay_support import replay_prompts, trace_of, write_trace
from support.toy_policy import ROW

TESTS = Path(__file__).parents[2]

# Ends of 4, 2 and 3 blocks; with two slots the third one pushes out the shallowest, which is the
# second; lru drops the first, which the last prompt would resume from: 4 blocks of 512 tokens.
PROMPTS = [[1, 2, 3, 4], [11, 12], [21, 22, 23], [1, 2, 3, 4, 5]]


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "POLICIES", (*policies.POLICIES, ROW))


def test_it_is_replayed() -> None:
    assert replay_prompts(PROMPTS, "shallowest", 2).hit_tokens == 2048
    assert replay_prompts(PROMPTS, "lru", 2).hit_tokens == 0


def test_a_wrong_name_is_answered_with_it() -> None:
    with pytest.raises(SettingsError, match=r"unknown policy 'x': use .*, shallowest"):
        replay_prompts(PROMPTS, "x", 2)


def test_it_is_an_arm_and_part_of_the_experiments() -> None:
    arm = parse_arm("a:policy=shallowest,slots=2,admission=ends")
    played = TraceReplay(trace_of(PROMPTS)).play(arm)
    assert [request.hit_tokens for request in played.served] == [0, 0, 0, 2048]
    (cell, *_) = Experiment("agent-traces", trace="t.jsonl").cells()
    assert "core shallowest" in [arm.name for arm in cell.arms]
    assert parse_arm("a:engine=vllm,policy=shallowest,kv_tokens=4096").policy == "shallowest"


def test_it_has_a_line_of_its_own_colour() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: plot)")
    rows = [replay_prompts(PROMPTS, name, 2) for name in policies.policy_names(policies.REPLAY)]
    lines = {str(line.get_label()): line for line in _figure(rows, "t").axes[0].lines}
    colors = [lines[f"{row.policy}, ends"].get_color() for row in rows]
    assert len(set(colors)) == len(rows)


def test_an_engine_takes_it_and_its_dry_run_shows_it() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    assert "shallowest" in parser.format_help()
    given = {"kv_cache_plugin": "statecache", "policy": "shallowest"}
    settings = Settings.from_given(given, {})
    shadow = ShadowReplay(2, 512 * 64, settings.cost_model())
    for prompt in PROMPTS:
        shadow.observe(prompt, 0)
    assert "dry_run_hit_tokens|shallowest" in shadow.sample()


def test_the_command_knows_it(tmp_path: Path) -> None:
    """In a process of its own: the command's help is made when it is imported."""
    trace = write_trace(tmp_path / "t.jsonl", PROMPTS)
    program = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from statecache.index import policies
from support.toy_policy import ROW
policies.POLICIES = (*policies.POLICIES, ROW)
from statecache.cli.main import main
sys.argv[0] = "statecache"
main()
"""

    def said(*words: str) -> str:
        command = [sys.executable, "-W", "error", "-c", program, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    shown = " ".join(said("replay", "--help").replace("│", " ").split())
    assert "shallowest: the shallowest" in shown
    shown = said("replay", str(trace), "--policy", "shallowest", "--slots", "2")
    assert re.search(r"^shallowest +2 ", shown, re.MULTILINE)


def test_without_the_row_it_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "POLICIES", policies.POLICIES[:-1])
    with pytest.raises(SettingsError, match="unknown policy 'shallowest'"):
        replay_prompts(PROMPTS, "shallowest", 2)
