"""Compare `learned` with lru, gds and every fixed interior weight on the recorded traces.

    python tests/bench/learned_table.py TRACES [--cell agent_coding,all,dense]

TRACES is the folder of the recorded traces. Prints a table for docs/learned.md. Exit code 1 when
`learned` is more than 0.002 below the best of the others, or below a published rate.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from statecache import CostModel
from statecache.replay.kv_residency import kv_timeline
from statecache.replay.prefix_tree import PrefixTree
from statecache.replay.schedule import ReplaySchedule, make_schedule
from statecache.replay.state_slots import play, replay
from statecache.replay.weighted_gds import WeightedGds
from statecache.trace.format import read_trace

PUBLISHED = json.loads(Path(__file__).parents[1].joinpath("golden/published.json").read_bytes())
SLOTS = (32, 64, 96, 128, 192, 256, 384, 512, 1024)
WEIGHTS = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0)
CELLS = [
    (trace, limit, admission)
    for trace, limit in (("agent_coding", None), ("conversation", 3_000), ("conversation", None))
    for admission in ("dense", "ends")
]
TOLERANCE = 0.002


class _Weighted(WeightedGds):
    """Interior weights know nothing of prompt ends."""

    needs_prompts = False

    def insert(self, *where: object, end: bool = False) -> None:
        del end
        super().insert(*where)  # type: ignore[arg-type]

    def touch(self, state: int, end: bool = False) -> None:
        del end
        super().touch(state)


def rate(schedule: ReplaySchedule, policy: str, slots: int) -> float:
    row = replay(schedule, policy, slots)
    return row.hit_tokens / row.prompt_tokens


def weighted_rate(schedule: ReplaySchedule, weight: float, slots: int) -> float:
    hits, _ = play(schedule, _Weighted(weight, CostModel()), slots)  # type: ignore[arg-type]
    return sum(hits) / sum(request.prompt_tokens for request in schedule.requests)


def rows(traces: Path, trace: str, limit: int | None, admission: str) -> Iterator[float]:
    """Print a row a slot count; yield how far `learned` is above the best of the others."""
    tree = PrefixTree.of(read_trace(str(traces / f"{trace}.jsonl.gz"), limit=limit))
    schedule = make_schedule(tree, kv_timeline(tree, None), admission)
    for slots in SLOTS:
        lru, gds, learned = (rate(schedule, policy, slots) for policy in ("lru", "gds", "learned"))
        best, weight = max((weighted_rate(schedule, w, slots), -w) for w in WEIGHTS)
        above = learned - max(lru, gds, best)
        published = PUBLISHED["learned"].get(f"{trace},{limit or 'all'},{admission},{slots}")
        against = "" if published is None else f"{published:.3f} ({learned - published:+.4f})"
        sys.stdout.write(
            f"| {trace} | {limit or 'all'} | {admission} | {slots:,} | {lru:.4f} | {gds:.4f}"
            f" | {best:.4f} ({-weight:g}) | **{learned:.4f}** | {above:+.4f} | {against} |\n"
        )
        sys.stdout.flush()
        yield above
        if published is not None:
            yield learned - published


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--cell", help="trace,requests,admission: one part of the table alone")
    given = parser.parse_args()
    started = time.process_time()
    sys.stdout.write(
        "| trace | requests | admission | slots | lru | gds | best weight | learned"
        " | above the best | published (difference) |\n|---|---|---|---:|---|---|---|---|---|---|\n"
    )
    lowest = 1.0
    for trace, limit, admission in CELLS:
        if given.cell in (None, f"{trace},{limit or 'all'},{admission}"):
            lowest = min(lowest, *rows(given.traces, trace, limit, admission))
    sys.stdout.write(f"\nLowest difference {lowest:+.4f}; {time.process_time() - started:.0f} s\n")
    return 0 if lowest >= -TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
