"""Play `learned` on workloads that a seed draws, against the better of lru and gds.

    python tests/bench/learned_random.py --seed 0 --count 100

Each workload is played with dense states and with ends only, at 16, 64 and 256 slots. A difference
is that of the token hit rates. Prints their distribution, the worst with the seed of its workload,
and how the difference goes after a change of phase. Exit code 1 when the worst is below -0.01.
"""

import argparse
import sys
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from statecache import CostModel
from statecache.replay.kv_residency import kv_timeline
from statecache.replay.prefix_tree import PrefixTree
from statecache.replay.schedule import make_schedule
from statecache.replay.state_slots import serve
from statecache.trace.format import read_trace
from statecache.trace.generate_mixed import MixedWorkload, drawn_workload, mixed_lines

ADMISSIONS = ("dense", "ends")
SLOTS = (16, 64, 256)
GOAL = -0.01
WINDOW = 250  # requests after a change of phase that are looked at together

Cell = tuple[float, int, str, int, str]  # difference, seed, admission, slots, the three rates


def tree_of(workload: MixedWorkload) -> PrefixTree:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "workload.jsonl"
        path.write_bytes(b"".join(mixed_lines(workload)))
        return PrefixTree.of(read_trace(str(path)))


def play(seed: int, windows: dict[int, list[float]]) -> list[Cell]:
    """Return the cells of one workload; add what follows its change of phase to `windows`."""
    workload = drawn_workload(seed)
    tree = tree_of(workload)
    cells: list[Cell] = []
    for admission, slots in product(ADMISSIONS, SLOTS):
        schedule = make_schedule(tree, kv_timeline(tree, None), admission)
        tokens = [request.prompt_tokens for request in schedule.requests]
        hits = {p: serve(schedule, p, slots, CostModel())[0] for p in ("lru", "gds", "learned")}
        rates = {policy: sum(hit) / sum(tokens) for policy, hit in hits.items()}
        difference = rates["learned"] - max(rates["lru"], rates["gds"])
        shown = " ".join(f"{policy} {rate:.4f}" for policy, rate in rates.items())
        cells.append((difference, seed, admission, slots, shown))
        if workload.phase:
            for start in range(len(tokens) // 2, len(tokens), WINDOW):
                part = slice(start, start + WINDOW)
                of = {policy: sum(hit[part]) / sum(tokens[part]) for policy, hit in hits.items()}
                after = start - len(tokens) // 2
                windows.setdefault(after, []).append(of["learned"] - max(of["lru"], of["gds"]))
    return cells


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    given = parser.parse_args()
    cells: list[Cell] = []
    windows: dict[int, list[float]] = {}
    for seed in range(given.seed, given.seed + given.count):
        cells += play(seed, windows)
    cells.sort()
    differences = [cell[0] for cell in cells]
    write = sys.stdout.write
    write(f"{given.count} workloads from seed {given.seed}, {len(cells)} cells\n")
    for share in (0, 1, 5, 25, 50, 75, 95, 100):
        place = round(share / 100 * (len(differences) - 1))
        write(f"{share:4} % {differences[place]:+.4f}\n")
    write(f"mean   {sum(differences) / len(differences):+.4f}\n")
    write(f"below -0.001: {sum(d < -0.001 for d in differences)}, below {GOAL}:")
    write(f" {sum(d < GOAL for d in differences)}\n\nthe worst:\n")
    for difference, seed, admission, slots, shown in cells[:6]:
        write(f"{difference:+.4f} seed {seed} {admission} {slots} slots: {shown}\n")
        write(f"        {msgspec.json.encode(drawn_workload(seed)).decode()}\n")
    write("\nrequests after a change of phase: mean and worst difference\n")
    for after, found in sorted(windows.items()):
        mean = sum(found) / len(found)
        write(f"{after:6} to {after + WINDOW:6} {mean:+.4f} {min(found):+.4f}\n")
    return 0 if differences[0] >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
