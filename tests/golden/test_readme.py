"""The numbers and the code of README.md are those of the commands beside them."""

import re
import subprocess
from pathlib import Path

import pytest

from replay_support import needs_recorded, recorded_plan
from statecache.generate import AgentWorkload, agent_lines
from statecache.plan import Plan, PrefixTree, kv_timeline, make_plan
from statecache.replay import ReplayRow, replay
from statecache.trace import read_trace

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def table_after(heading: str) -> list[list[float]]:
    """Return the rows of numbers of the first table after `heading`."""
    rows = README.partition(heading)[2].partition("\n|---")[2].partition("\n\n")[0].splitlines()
    return [[float(cell.replace(",", "")) for cell in re.findall(r"[\d.,]+", r)] for r in rows[1:]]


def rows_of(plan: Plan, policy: str, slots: list[float]) -> list[ReplayRow]:
    return [replay(plan, policy, int(n)) for n in slots]


def hit_rate(row: ReplayRow) -> float:
    return round(row.hit_tokens / row.prompt_tokens, 4)


def test_generated_workload(tmp_path: Path) -> None:
    table = table_after("**What it gains**")
    assert len(table) == 5
    trace = tmp_path / "agent.jsonl"
    trace.write_bytes(b"".join(agent_lines(AgentWorkload(sessions=64, turns=40, seed=0))))
    tree = PrefixTree.of(read_trace(str(trace)))
    plan = make_plan(tree, kv_timeline(tree, None), "dense")
    slots = [row[0] for row in table]
    for column, policy in ((1, "lru"), (2, "gds")):
        rows = rows_of(plan, policy, slots)
        assert [hit_rate(row) for row in rows] == [row[column] for row in table]
        missed = [round(row.missed_by_state_tokens / row.requests) for row in rows]
        assert missed == [row[column + 2] for row in table]


@needs_recorded
def test_recorded_workload() -> None:
    table = table_after("and a recorded one")
    assert len(table) == 6
    plan = recorded_plan("agent_coding", "dense")
    slots = [row[0] for row in table]
    for column, policy in ((1, "lru"), (2, "gds"), (3, "clairvoyant")):
        assert [hit_rate(row) for row in rows_of(plan, policy, slots)] == [
            row[column] for row in table
        ]


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_code(code: str) -> None:
    exec(compile(code, "README.md", "exec"), {})


def test_links_lead_somewhere() -> None:
    pages = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert "README.md" in pages
    for page in map(ROOT.joinpath, pages):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if not target.startswith("https://"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"
