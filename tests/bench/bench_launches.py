"""Host time of a checkpoint copy, whatever the layers, without the copying.

    python tests/bench/bench_launches.py [--against FOLDER] [--blocks 9]

Dry: every listed pair is skipped, so what is left is what the host does before a GPU has anything
to do. `--against` names the folder another statecache is installed in (`site-packages`): both run
by turns, block by block, each in a process of its own; a ratio is taken within a block and given as
its median. "operators" are the launches alone, through torch's dispatcher: what is in C++.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

CALLS = 200
SLOTS = 8
PAIRS = 2
NONE = [-1] * PAIRS


def make_cases() -> dict[str, dict[str, Callable[[], Any]]]:
    """Return, by layout, the calls to time."""
    import torch

    from statecache.checkpoint.pool import ActiveState, CheckpointPool, SideState

    torch.set_num_threads(1)

    def apart(layers: int) -> ActiveState:
        pages = torch.zeros(layers, SLOTS, 128)
        conv = [page[:, :60].view(SLOTS, 20, 3) for page in pages]
        return ActiveState([page[:, 64:].view(SLOTS, 1, 8, 8) for page in pages], conv)

    def stacked(layers: int, side: dict[str, SideState]) -> ActiveState:
        conv = torch.zeros(layers, SLOTS, 20, 3)
        return ActiveState(torch.zeros(layers, SLOTS, 1, 8, 8), [conv], side)

    both = {
        "short_conv": SideState(torch.zeros(36, SLOTS, 5), 1),
        "ngram": SideState(torch.zeros(SLOTS, 3), 0),
    }
    states = {
        "stacked, 36 layers": (stacked(36, {}), "int8"),
        "stacked, 36 layers, two side states": (stacked(36, both), "int8"),
    }
    for mode in ("int8", "native"):
        states |= {f"apart, {n} layers, {mode}": (apart(n), mode) for n in (12, 23, 36)}
    cases = {}
    for name, (active, mode) in states.items():
        pool = CheckpointPool(active, SLOTS, mode=mode)
        slots = pool.alloc(PAIRS)
        pool.store(active, list(range(PAIRS)), slots).refused()

        def store(pool: Any = pool, active: Any = active, slots: Any = slots) -> None:
            pool.store(active, NONE, slots)

        def load(pool: Any = pool, active: Any = active, slots: Any = slots) -> None:
            pool.load(slots, active, NONE)

        cases[name] = {"store": store, "load": load}
        if hasattr(pool, "_launches"):
            nowhere = torch.tensor(NONE)
            flags = torch.zeros(PAIRS, dtype=torch.int32)
            layout = pool._checked(active)

            def operators(
                pool: Any = pool, layout: Any = layout, to: Any = (nowhere, flags)
            ) -> None:
                pool._launches.store(layout, to[0], to[0], to[1])

            cases[name]["operators"] = operators
    return cases


def serve(site: str | None) -> None:
    """Time a block for each line on stdin: microseconds of CPU by layout and call, as JSON."""
    if site is not None:
        sys.path.insert(0, site)
    cases = make_cases()
    for _ in sys.stdin:
        block = {}
        for name, calls in cases.items():
            for way, call in calls.items():
                call()
                begin = time.thread_time()
                for _ in range(CALLS):
                    call()
                block[f"{name}|{way}"] = (time.thread_time() - begin) / CALLS * 1e6
        sys.stdout.write(json.dumps(block) + "\n")
        sys.stdout.flush()


class Contender:
    """A process that times blocks when it is told to."""

    def __init__(self, site: str | None) -> None:
        command = [sys.executable, __file__, "--serve", *([site] if site else [])]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def block(self) -> dict[str, float]:
        """Return the microseconds of one block."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        times: dict[str, float] = json.loads(self._process.stdout.readline())
        return times

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def main() -> None:
    """Print a line for each layout and call."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against")
    parser.add_argument("--blocks", type=int, default=9)
    parser.add_argument("--serve", nargs="*")
    options = parser.parse_args()
    if options.serve is not None:
        serve(*(options.serve or [None]))
        return
    with contextlib.ExitStack() as stack:
        sites = [None, options.against] if options.against else [None]
        contenders = [Contender(site) for site in sites]
        for contender in contenders:
            stack.callback(contender.close)
        blocks = [[c.block() for c in contenders] for _ in range(options.blocks + 1)][1:]
    for name in blocks[0][0]:
        ours = [turn[0][name] for turn in blocks]
        line = f"{name.replace('|', ': '):46} {statistics.median(ours):7.1f} us"
        line += f" ({min(ours):.1f}-{max(ours):.1f})"
        if options.against and name in blocks[0][1]:
            theirs = [turn[1][name] for turn in blocks]
            ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
            line += f"; there {statistics.median(theirs):7.1f} us, {statistics.median(ratios):5.2f}"
            line += f" times as long ({min(ratios):.2f}-{max(ratios):.2f})"
        sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
