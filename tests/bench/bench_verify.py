"""What `--statecache-verify` costs, in CPU time: in a real vLLM, and for one state of a real size.

In the engine, rounds of new prompts are asked at each rate in turn, once to store their states and
once to restore them, so that a busy machine slows all alike; a ratio is of one round to the round
at rate 0 beside it. The model is tiny, and so is the work that a state saves. A share costs that
share of rate 1. Run it with the Python of the engines' environment:

    .venv-engines/bin/python tests/bench/bench_verify.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path.append(str(TESTS / "engines" / "vllm"))
sys.path.append(str(TESTS))
warnings.simplefilter("ignore")

from engine import document, run  # noqa: E402
from test_restore import drop_state_blocks  # noqa: E402
from tiny_models import make_tiny_model  # noqa: E402

RATES = (0.0, 0.01, 1.0)


def in_engine(mode: str, rounds: int, prompts: int) -> None:
    from statecache_vllm import seams

    folder = Path(tempfile.mkdtemp())
    plugin = {"checkpoints": mode, "checkpoint_slots": prompts}
    times: dict[float, list[float]] = {rate: [] for rate in RATES}
    with run(make_tiny_model("qwen3_next", folder), blocks=128, plugin=plugin) as engine:
        records = seams.transfer_group().worker_side.store.records
        number = 0
        for turn in range(rounds + 1):
            for rate in RATES:
                records.rate = rate
                asked = [document(number + at, 276) for at in range(prompts)]
                number += prompts
                began = time.process_time()
                engine.ask(asked, tokens=1)
                drop_state_blocks(engine)
                engine.ask(asked, tokens=1)
                if turn:  # the first round warms up
                    times[rate].append(time.process_time() - began)
        restored = engine.scheduler_side.checkpoints.counts.restored
        assert restored == number, f"{restored} of {number} prompts were restored"
    for rate in RATES[1:]:
        ratios = [t / base for t, base in zip(times[rate], times[0.0], strict=True)]
        print(f"engine {mode:6} rate {rate:<4}: {_spread(ratios, '.4f')} of rate 0")


def one_state(mode: str, layers: int, rounds: int) -> None:
    """32 heads of 128 x 128 in bfloat16 a layer: Qwen3-Next has 36 layers."""
    import torch

    from statecache.checkpoint.pool import ActiveState, CheckpointPool

    torch.set_num_threads(1)
    active = ActiveState(torch.randn(layers, 2, 32, 128, 128).bfloat16())
    pool = CheckpointPool(active, 1, mode=mode)
    (slot,) = pool.alloc(1)
    source = torch.tensor([0])

    def copies() -> None:
        pool.store(active, [0], [slot]).refused()
        pool.load([slot], active, [1])

    def sums() -> None:
        pool.checksums([slot])
        pool.checksums([slot])

    calls: dict[str, Callable[[], object]] = {"store + restore": copies, "two sums": sums}
    if mode == "int8":
        calls["error"] = lambda: pool.relative_errors(active, source, slot)
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            began = time.process_time()
            call()
            if turn:
                taken[name].append((time.process_time() - began) * 1e3)
    mib = pool.bytes_per_state / 2**20
    for name, found in taken.items():
        print(f"state {mode:6} {mib:.0f} MiB, {name:15}: {_spread(found, '.1f')} ms")


def _spread(found: list[float], form: str) -> str:
    low, middle, high = statistics.quantiles(found, n=4)
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--layers", type=int, default=36)
    given = parser.parse_args()
    for mode in ("native", "int8"):
        one_state(mode, given.layers, given.rounds)
    for mode in ("native", "int8"):
        in_engine(mode, given.rounds, given.prompts)


if __name__ == "__main__":
    main()
