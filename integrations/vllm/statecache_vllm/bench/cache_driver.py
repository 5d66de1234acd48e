"""Plays arms of `statecache ab` on vLLM's scheduler and block pool, in a process of its own.

16 tokens here, a block of vLLM, stand for a block of 512. The cost model is scaled by powers of
two, so that gds sees exactly the costs of the real depths. Requests are served one at a time.

What differs from the driver `core`, in vLLM 0.32 (docs/ab.md has the numbers):
- The last token of a prompt is always computed: the last state lies a block before the end of a
  prompt, which is whole blocks here.
- A state stays where a known prefix ends, too.
- A state takes blocks of the one pool while it is computed, and stays there until they are needed,
  also beside a checkpoint pool: a request may resume from either.
- A request holds two states in three blocks each, and one block is vLLM's own: what fits the
  replay's KV alone may not fit here.
- Blocks go in the order of vLLM's free queue, or of the plugin's, not leaf by leaf.
With memory for all of them every request hits what it does in `core`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from statecache.ab.arms import Arm
from statecache.ab.drivers.cache_layer_protocol import Job, answer_jobs
from statecache.ab.results import Played, Served
from statecache.engine.cost import cost_text, scaled_cost
from statecache.trace.format import BLOCK_TOKENS

__all__ = ["main", "play"]


def main() -> None:
    """Answer the jobs of a test until there are no more."""
    answer_jobs(_start)


def _start() -> tuple[str, Callable[[Job], Played]]:
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from statecache_vllm import seams

    seams.load("vllm.v1.core.sched.scheduler")
    return seams.engine_version(), play


def play(job: Job) -> Played:
    """Serve the prompts one after the other on a cache of the arm."""
    from statecache_vllm.bench.cache_layer import BLOCK, CacheLayer, write_model

    arm = job.arm
    blocks = arm.pool_blocks if arm.pool == "shared" else arm.kv_blocks or 1
    chunk = arm.chunk // BLOCK_TOKENS * BLOCK
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        layer = CacheLayer(
            Path(folder),
            blocks,
            budget=chunk,
            longest=(max(map(len, job.prompts)) + 2) * BLOCK,
            retention=chunk if arm.admission == "dense" else 0,
            plugin=_plugin(arm, BLOCK),
        )
    served = []
    for prompt in job.prompts:
        if _least_blocks(len(prompt)) > blocks:
            served.append(Served(len(prompt) * BLOCK_TOKENS, 0, 0, rejected=True))
            continue
        resident, hit = layer.ask([token for block in prompt for token in [block] * BLOCK])
        served.append(Served.of_blocks(len(prompt), resident // BLOCK, hit // BLOCK))
    return Played(served, *layer.evicted_and_skipped)


def _plugin(arm: Arm, block: int) -> dict[str, Any] | None:
    """Return the settings of the plugin by name; None for vLLM alone."""
    if arm.policy == "stock":
        return None
    each = BLOCK_TOKENS // block
    given: dict[str, Any] = {"cost": cost_text(scaled_cost(arm.cost_model(), each))}
    if arm.admission == "dense":
        given["checkpoint_interval"] = arm.chunk // each
    if arm.pool == "shared":
        return given | {"block_policy": arm.policy}
    return given | {
        "policy": arm.policy,
        "checkpoints": arm.pool,
        "checkpoint_slots": arm.states,
    }


def _least_blocks(prompt_blocks: int) -> int:
    """Return how many blocks a request needs: its KV, two states, its next block and vLLM's own."""
    return prompt_blocks + 2 * 3 + 2


if __name__ == "__main__":
    main()
