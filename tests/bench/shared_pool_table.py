"""Replay the whole published tables of pools of blocks, and time it.

    python tests/bench/shared_pool_table.py TRACES

TRACES is the folder of the recorded traces. The last column is gds without the two settings to
compare with. Exit code 1 when a rate is 0.003 or more off, but for the
cell listed as not reproduced.
"""

import argparse
import json
import sys
import time
from functools import cache
from pathlib import Path

from statecache.replay.block_pools import PoolRow, SlotRule, replay_pool, replay_slots
from statecache.replay.prefix_tree import PrefixTree, PreorderTree
from statecache.trace.format import read_trace

PUBLISHED = json.loads(Path(__file__).parents[1].joinpath("golden/published.json").read_bytes())
PUBLISHED_RULE = SlotRule("gds", interior_weight=0.2, queue_ratio=2)
PLAIN_RULE = SlotRule("gds")  # what engines have
LARGEST_DIFFERENCE = 0.003


@cache
def tree_of(traces: Path, name: str) -> PrefixTree:
    return PrefixTree.of(read_trace(str(traces / f"{name}.jsonl.gz")))


@cache
def preorder_of(traces: Path, name: str) -> PreorderTree:
    return PreorderTree.of(tree_of(traces, name))


def rate_of(row: PoolRow) -> float:
    return row.hit_tokens / row.prompt_tokens


def show(name: str, label: str, row: PoolRow, expected: float, more: str = "") -> bool:
    """Print a line; return whether it is near the published rate."""
    rate = rate_of(row)
    near = abs(rate - expected) < LARGEST_DIFFERENCE
    sys.stdout.write(
        f"{name:12} {row.pool_blocks:6,} {label:22}"
        f" {expected:.3f} {rate:.4f} {rate - expected:+.4f}{more}{'' if near else '  differs'}\n"
    )
    return near


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("traces", type=Path)
    traces = parser.parse_args().traces
    started = time.process_time()
    sys.stdout.write(
        f"{'trace':12} {'blocks':6} {'':22} published, replayed, difference, plain gds\n"
    )
    near = []
    for name, blocks, block_policy, expected in PUBLISHED["shared_pool"]:
        row = replay_pool(tree_of(traces, name), blocks, block_policy)
        near.append(show(name, block_policy, row, expected))
    for name, blocks, slots, state_blocks, expected in PUBLISHED["own_slots"]:
        tree = preorder_of(traces, name)
        row, plain = (
            replay_slots(tree, blocks, slots, rule, state_blocks=state_blocks)
            for rule in (PUBLISHED_RULE, PLAIN_RULE)
        )
        label, more = f"{slots:,} slots of {state_blocks}", f" {rate_of(plain):.4f}"
        cell = [name, blocks, slots, state_blocks, expected]
        near.append(show(name, label, row, expected, more) or cell in PUBLISHED["not_reproduced"])
    sys.stdout.write(f"{len(near)} cells, {time.process_time() - started:.1f} s of CPU\n")
    return 0 if all(near) else 1


if __name__ == "__main__":
    sys.exit(main())
