"""The table of docs/learned.md: its column of fixed weights."""

from pathlib import Path

from bench.learned_table import rate, weighted_rate
from statecache.replay.kv_residency import kv_timeline
from statecache.replay.prefix_tree import PrefixTree
from statecache.replay.schedule import make_schedule
from statecache.trace.format import read_trace

EXCERPT = Path(__file__).parents[2] / "golden" / "excerpt" / "agent_coding.jsonl.gz"


def test_an_interior_weight_of_one_is_gds() -> None:
    tree = PrefixTree.of(read_trace(str(EXCERPT), limit=200))
    schedule = make_schedule(tree, kv_timeline(tree, None), "dense")
    assert 0 < weighted_rate(schedule, 1.0, 16) == rate(schedule, "gds", 16)
    assert weighted_rate(schedule, 0.01, 16) != rate(schedule, "gds", 16)
