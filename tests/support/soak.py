"""Runs traffic for long and watches what must not grow. What must hold is the caller's to check."""

from __future__ import annotations

import argparse
import gc
import resource
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

MIB = 1 << 20
WARM = 0.25  # of the checks: caches fill, Python and the allocator settle
# What may come after the warm-up: pages of the allocator, and the little that a long run adds.
NOISE_MIB = 2.0  # measured in the short form: 1.5 at most
BYTES_A_REQUEST = 16


class Report(NamedTuple):
    """What a soak saw. Sizes are resident MiB: after the warm-up, at the end, at their highest."""

    name: str
    requests: int
    warm_requests: int
    seconds: float
    checks: int
    warm_mib: float
    end_mib: float
    peak_mib: float

    @property
    def growth_mib(self) -> float:
        return self.end_mib - self.warm_mib

    @property
    def most_growth_mib(self) -> float:
        """What the requests after the warm-up may add; far less than 10 kB each."""
        return NOISE_MIB + (self.requests - self.warm_requests) * BYTES_A_REQUEST / MIB

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.requests:,} requests in {self.seconds:,.0f} s, {self.checks:,}"
            f" checks of every invariant; resident {self.warm_mib:.1f} MiB after the warm-up,"
            f" {self.end_mib:.1f} at the end ({self.growth_mib:+.1f}), {self.peak_mib:.1f} at most"
        )


def resident_mib() -> float:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / MIB


def soak(
    name: str,
    steps: Iterable[object],
    served: Callable[[], int],
    check: Callable[[], None],
    *,
    requests: int,
    seconds: float,
    every: int = 1_000,
) -> Report:
    """Take steps until so many requests were served or the time is over; `check` every so many."""
    start = time.monotonic()
    due, sizes = every, []
    for _ in steps:
        over = time.monotonic() - start > seconds
        if served() >= min(due, requests) or over:
            check()
            sizes.append((served(), resident_mib()))
            due += every
            if over or served() >= requests:
                break
    took = time.monotonic() - start
    warm_requests, warm = sizes[int(len(sizes) * WARM)]
    requests, end = sizes[-1]
    peak = max(mib for _, mib in sizes)
    return Report(name, requests, warm_requests, took, len(sizes), warm, end, peak)


def main(kinds: Iterable[str], run: Callable[[str, int, float], Report]) -> None:
    """Soak each kind for a share of --seconds or until --requests were served by each.

    With --kinds those whose names hold it.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=1_000_000, help="of each kind")
    parser.add_argument("--seconds", type=float, default=7_200, help="of all kinds together")
    parser.add_argument("--kinds", default="", help="a part of the names of those to soak")
    asked = parser.parse_args()
    kinds = [kind for kind in kinds if asked.kinds in kind]
    if not kinds:
        sys.exit(f"soak: no kind has {asked.kinds!r} in its name")
    print(
        f"soak: {asked.requests:,} requests through each of {', '.join(kinds)}, or"
        f" {asked.seconds / len(kinds):,.0f} s each",
        flush=True,
    )
    grown = []
    for kind in kinds:
        report = run(kind, asked.requests, asked.seconds / len(kinds))
        print(report, flush=True)
        if report.growth_mib > report.most_growth_mib:
            grown.append(f"{kind} (at most {report.most_growth_mib:.1f} MiB)")
    if grown:
        sys.exit(f"soak: memory grew too much: {', '.join(grown)}")
