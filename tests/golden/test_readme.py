"""The numbers and the code of README.md are those of the commands beside them."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from statecache.ab.plans import read_plan
from statecache.replay.kv_residency import kv_timeline
from statecache.replay.prefix_tree import PrefixTree
from statecache.replay.schedule import ReplaySchedule, make_schedule
from statecache.replay.state_slots import ReplayRow, replay
from statecache.sizing.model_config import read_model
from statecache.sizing.splits import Demand, rated_splits
from statecache.trace.format import read_trace
from statecache.trace.generate_agent import AgentWorkload, agent_lines
from support.model_configs import QWEN3_NEXT
from support.readme_table import README, table_after

ROOT = Path(__file__).parents[2]


def rows_of(schedule: ReplaySchedule, policy: str, slots: list[float]) -> list[ReplayRow]:
    return [replay(schedule, policy, int(n)) for n in slots]


def hit_rate(row: ReplayRow) -> float:
    return round(row.hit_tokens / row.prompt_tokens, 4)


def test_generated_workload(tmp_path: Path) -> None:
    table = table_after("**What it gains**")
    assert len(table) == 5
    trace = tmp_path / "agent.jsonl"
    trace.write_bytes(b"".join(agent_lines(AgentWorkload(sessions=64, turns=40, seed=0))))
    tree = PrefixTree.of(read_trace(str(trace)))
    schedule = make_schedule(tree, kv_timeline(tree, None), "dense")
    slots = [row[0] for row in table]
    policies = ("lru", "gds", "learned")
    for column, policy in enumerate(policies, start=1):
        rows = rows_of(schedule, policy, slots)
        assert [hit_rate(row) for row in rows] == [row[column] for row in table]
        missed = [round(row.missed_by_state_tokens / row.requests) for row in rows]
        assert missed == [row[column + len(policies)] for row in table]


def test_splits_of_the_memory(tmp_path: Path) -> None:
    """Rows: SGLang native, SGLang int8, vLLM native, vLLM int8; beside them vLLM without a pool."""
    table = table_after("## How to split my memory")
    trace = tmp_path / "agent.jsonl"
    trace.write_bytes(b"".join(agent_lines(AgentWorkload(sessions=64, turns=40, seed=0))))
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_NEXT))
    demand = Demand(
        model=read_model(tmp_path),
        memory_bytes=60 * 2**30,
        engines=["sglang", "vllm"],
        shares=[5, 10, 20, 30, 40, 60],
        running=16,
    )
    rates: dict[str, list[float]] = {}
    for split in rated_splits(demand, PrefixTree.of(read_trace(str(trace)))):
        rates.setdefault(f"{split.engine} {split.states}", []).append(round(split.hit_rate, 4))
    (shared,) = rates.pop("vllm shared")
    assert f"(vLLM without a pool: {shared:.4f}.)" in README
    assert [row[-6:] for row in table] == list(rates.values())


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_code(code: str) -> None:
    exec(compile(code, "README.md", "exec"), {})


@pytest.mark.parametrize("plan", re.findall(r"```toml\n(.*?)```", README, re.DOTALL))
def test_plan(plan: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(plan)
    given = dict.fromkeys(("workload", "repeats", "seed", "warm_up", "python", "servers", "speed"))
    trial = read_plan(path, [], **given)
    assert [arm.name for arm in trial.cells[0].arms] == ["off", "on"]
    assert trial.servers is not None
    assert trial.servers.one_at_a_time


def test_links_lead_somewhere() -> None:
    pages = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert "README.md" in pages
    for page in map(ROOT.joinpath, pages):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if not target.startswith("https://"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize(("dtype", "times"), [("bfloat16", 1.9), ("float32", 3.6)])
def test_int8_holds_as_many_more_states_as_said(dtype: str, times: float) -> None:
    """Qwen3-Next-80B: 36 layers of 32 heads of 128 x 128, and bf16 convolution states."""
    torch = pytest.importorskip("torch")
    from statecache.checkpoint.pool import ActiveState, estimate_bytes

    temporal = torch.empty(36, 1, 32, 128, 128, dtype=getattr(torch, dtype), device="meta")
    conv = torch.empty(36, 1, 8192, 3, dtype=torch.bfloat16, device="meta")
    active = ActiveState(temporal, [conv])
    ratio = estimate_bytes(active, 1, mode="native") / estimate_bytes(active, 1)
    assert round(ratio, 1) == times
    assert f"{times} times as many" in README
