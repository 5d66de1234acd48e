"""How fast the checkpoint copies are, against plain torch operators and against a memcpy.

    python tests/bench/bench_checkpoint.py [--device cuda] [--slots 1 8 64] [--runs 9]

All contenders run by turns in one process; a ratio is taken within a turn and given as its median
with the lowest and highest. "memcpy" is one copy of as many bytes as the native copy reads and
writes together, by torch, with as many threads. On a GPU each call is timed behind work that keeps
the device busy until the host has queued it, and few slots are other slots each time, so that
neither the host nor a cache is measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch

from statecache.checkpoint.ops import CheckpointOps, native_ops, plain_ops
from statecache.checkpoint.reference import scale_dtype

BUSY_CYCLES = 2_000_000  # about a millisecond
FEW_SLOTS, SETS = 8, 4  # of so many slots at most there are so many sets
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Case:
    """States of one shape, with what it takes to store, load and memcpy them."""

    def __init__(
        self, shape: tuple[int, int, int, int], slots: int, dtype: torch.dtype, device: str
    ):
        layers, heads, d_v, d_k = shape
        sets = SETS if device == "cuda" and slots <= FEW_SLOTS else 1
        states = (layers, slots * sets, heads, d_v, d_k)
        self.device = device
        self.active = [torch.randn(states, device=device).to(dtype)]
        self.quantized = torch.zeros(states, dtype=torch.int8, device=device)
        scales = (layers, slots * sets, heads, 1, d_k)
        self.scale = torch.zeros(scales, dtype=scale_dtype(dtype), device=device)
        self.report = torch.zeros(slots, dtype=torch.int32, device=device)
        self._slots = list(torch.arange(slots * sets, device=device).split(slots))
        tensors = (self.active[0], self.quantized, self.scale)
        self.bytes_moved = sum(t.numel() * t.element_size() for t in tensors) // sets
        self._from = torch.ones(sets, self.bytes_moved // 2, dtype=torch.uint8, device=device)
        self._to = torch.zeros_like(self._from)
        self._calls = 0

    def _next(self) -> int:
        self._calls += 1
        return self._calls % len(self._slots)

    def store(self, copies: CheckpointOps) -> None:
        slots = self._slots[self._next()]
        copies.store(self.active, self.quantized, self.scale, self.report, slots, slots)

    def load(self, copies: CheckpointOps) -> None:
        slots = self._slots[self._next()]
        copies.load(self.quantized, self.scale, self.active, slots, slots)

    def memcpy(self) -> None:
        at = self._next()
        self._to[at].copy_(self._from[at])

    def seconds(self, call: Callable[[], None]) -> float:
        """Return how long one call takes."""
        if self.device == "cpu":
            begin = time.perf_counter()
            call()
            return time.perf_counter() - begin
        begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(BUSY_CYCLES)
        begin_event.record()
        call()
        end_event.record()
        end_event.synchronize()
        return begin_event.elapsed_time(end_event) / 1e3


def raise_clocks() -> None:
    """Keep an idle GPU busy for a while."""
    matrix = torch.ones(4096, 4096, device="cuda", dtype=torch.bfloat16)
    until = time.perf_counter() + 0.2
    while time.perf_counter() < until:
        torch.matmul(matrix, matrix)
        torch.cuda.synchronize()


def spread(values: list[float]) -> str:
    """Return median, lowest and highest."""
    return f"{statistics.median(values):5.2f} ({min(values):.2f}-{max(values):.2f})"


def measure(case: Case, runs: int) -> list[dict[str, float]]:
    """Return the seconds of each contender, by turns; the first turn only warms up."""
    native, plain = native_ops(), plain_ops()
    calls: dict[str, Callable[[], None]] = {
        "memcpy": case.memcpy,
        "store": lambda: case.store(native),
        "load": lambda: case.load(native),
        "plain store": lambda: case.store(plain),
        "plain load": lambda: case.load(plain),
    }
    turns = [{name: case.seconds(call) for name, call in calls.items()} for _ in range(runs + 1)]
    return turns[1:]


def report(name: str, case: Case, turns: list[dict[str, float]]) -> None:
    """Print a line for each direction."""
    copied = statistics.median(turn["memcpy"] for turn in turns)
    for way in ("store", "load"):
        took = statistics.median(turn[way] for turn in turns)
        faster = spread([turn[f"plain {way}"] / turn[way] for turn in turns])
        slower = spread([turn[way] / turn["memcpy"] for turn in turns])
        sys.stdout.write(
            f"{name} {way:5}: {took * 1e3:8.2f} ms {case.bytes_moved / took / 1e9:7.1f} GB/s,"
            f" {copied / took:4.0%} of memcpy's rate; plain torch takes {faster} times as long;"
            f" {slower} times a memcpy\n"
        )
        sys.stdout.flush()


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--shape", type=int, nargs=4, default=(36, 32, 128, 128))
    parser.add_argument("--slots", type=int, nargs="+", default=[4])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args()
    threads = options.threads if options.device == "cpu" else options.threads[:1]
    sys.stdout.write(f"torch {torch.__version__}, layers heads d_v d_k {tuple(options.shape)}\n")
    if options.device == "cuda":
        raise_clocks()
    for count in threads:
        torch.set_num_threads(count)
        for name in options.dtypes:
            for slots in options.slots:
                case = Case(tuple(options.shape), slots, DTYPES[name], options.device)
                where = f"{count} threads" if options.device == "cpu" else "cuda"
                report(f"{where} {name} {slots:2} slots", case, measure(case, options.runs))
                del case


if __name__ == "__main__":
    main()
