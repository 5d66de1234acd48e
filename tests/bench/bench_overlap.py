"""How long the plugin holds SGLang's scheduler while a batch runs, with int8 checkpoints.

SGLang's real scheduling, cache layer and results, without a model: a batch takes 20 ms on a thread
of its own, as on a GPU, and a copy into the pool or out of it is over when the batches launched
before it are. The next batch is made meanwhile. A step takes the CPU time of its thread and what it
waits for copies; the wait for the result of the batch before is SGLang's own, and not part of it.
Alone: SGLang without the plugin, its states in full precision.

    .venv-engines/bin/python tests/bench/bench_overlap.py
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import queue
import statistics
import sys
import threading
import time
import warnings
from pathlib import Path

TESTS = Path(__file__).parents[1]
LAYER = TESTS / "engines" / "sglang"
sys.path.insert(0, str(LAYER / "standins"))
sys.path += [str(LAYER), str(TESTS)]
warnings.simplefilter("ignore")

from cache_layer import plugin  # noqa: E402
from speculative_chats import Chats  # noqa: E402
from speculative_parts import build, speculating  # noqa: E402

ARMS = {"alone": {}, "gds": {"policy": "gds"}, "learned": {"policy": "learned"}}
INT8 = {"checkpoints": "int8", "checkpoint_slots": 24}


class Copy:
    """An event behind the first `batches` batches."""

    def __init__(self, device: SlowDevice, batches: int) -> None:
        self._device, self._batches = device, batches

    def query(self) -> bool:
        return self._device.through >= self._batches

    def synchronize(self) -> None:
        began = time.perf_counter()
        self._device.wait_for(self._batches)
        self._device.held += time.perf_counter() - began


class SlowDevice:
    """Runs one batch after the other, each for so many seconds; the list of those in flight."""

    def __init__(self, seconds: float) -> None:
        self.launched = self.through = 0
        self.held = 0.0
        self._changed = threading.Condition()
        self._work: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._seconds = seconds
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._work.get():
            time.sleep(self._seconds)
            with self._changed:
                self.through += 1
                self._changed.notify_all()

    def launch(self) -> None:
        self.launched += 1
        self._work.put(True)

    def wait_for(self, batches: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.through >= batches)

    def end(self) -> None:
        self._work.put(False)
        self._thread.join()


class Copies:
    """The order of the copies of a pool, on that device."""

    def __init__(self, device: SlowDevice) -> None:
        self._device = device

    def begin(self) -> None:
        """A copy begins."""

    def end(self) -> Copy:
        return Copy(self._device, self._device.launched)


class InFlight(list):
    """What was launched and not taken yet."""

    def __init__(self, device: SlowDevice) -> None:
        super().__init__()
        self._device = device

    def append(self, batch: object) -> None:
        super().append(batch)
        self._device.launch()


def held(name: str, steps: int, seconds: float) -> tuple[list[float], float, float]:
    """Return the milliseconds each step held the scheduler, and of the copies: total and most."""
    waited: list[float] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(plugin(**({**ARMS[name], **INT8} if ARMS[name] else {})))
        traffic = build("rust", "extra_buffer")
        stack.enter_context(speculating("extra_buffer"))
        chats = Chats(traffic, seed=3, drafter=False)
        device = SlowDevice(seconds)
        chats.run.in_flight = InFlight(device)
        pool = traffic.requests.mamba_ckpt_pool
        if pool is not None:
            pool._pool._order = Copies(device)
        take, taken = chats.run._take, iter(range(1, 1 << 40))

        def take_when_through(*batch: object) -> None:
            device.wait_for(next(taken))
            take(*batch)

        chats.run._take = take_when_through
        times, turns = [], chats.steps()
        for _ in range(steps):
            began, device.held = time.thread_time(), 0.0
            next(turns)
            times.append(1e3 * (time.thread_time() - began + device.held))
            waited.append(1e3 * device.held)
        device.end()
    return times, sum(waited), max(waited)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--forward-ms", type=float, default=20.0)
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    rows = ["| | median ms a step | 99th percentile | waits for copies, ms in all | longest |"]
    rows.append("|---|---:|---:|---:|---:|")
    for name in ARMS:
        times, waited, longest = held(name, given.steps, given.forward_ms / 1e3)
        hundredths = statistics.quantiles(times, n=100)
        rows.append(
            f"| {name} | {hundredths[49]:.2f} | {hundredths[98]:.2f} | {waited:.1f} |"
            f" {longest:.2f} |"
        )
    sys.stdout.write("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
