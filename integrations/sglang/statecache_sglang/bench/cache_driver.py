"""Plays arms of `statecache ab` on SGLang's cache layer, in a process of its own.

One token here stands for a block of 512. The cost model is scaled by powers of two, so that gds
sees exactly the costs of the real depths. Requests are served one at a time.

What differs from the driver `core`, in SGLang 0.5.23 (docs/ab.md has the numbers):
- The end of a request is no use of the state it resumed from, in lru, and that state is locked only
  until the next one is cached: where a request sets several states, the order differs a little.
- A leaf loses its KV with its state. So less KV is resident: fewer tokens are missed by state, and
  the ceiling is lower, at the same hits.
- KV beyond the hit is computed into slots of its own before that which is resident is found: with
  little KV more of it is dropped.
Where each request sets or uses one state and KV is ample every hit is the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from statecache.ab.arms import Arm
from statecache.ab.drivers.cache_layer_protocol import Job, answer_jobs
from statecache.ab.results import Played, Served
from statecache.engine.cost import cost_text, scaled_cost
from statecache.engine.settings import Settings
from statecache.replay.schedule import admitted_blocks
from statecache.trace.format import BLOCK_TOKENS

__all__ = ["main", "play", "serve"]


def main() -> None:
    """Answer the jobs of a test until there are no more."""
    answer_jobs(_start)


def _start() -> tuple[str, Callable[[Job], Played]]:
    torch: Any = import_module("torch")
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    from statecache_sglang import seams

    seams.load("sglang.srt.mem_cache.unified_radix_cache")
    return seams.engine_version(), play


def play(job: Job) -> Played:
    """Serve the prompts one after the other on a cache of the arm."""
    from statecache_sglang.bench.cache_layer import CacheLayer

    arm = job.arm
    with _plugin(arm):
        layer = CacheLayer(
            arm.free_slots,
            min(arm.kv_blocks or 1, _most_kv(job.prompts)),
            states_per_path=arm.states_per_path,
            own_int8_slots=arm.states if _is_own_int8(arm) else 0,
        )
    every = arm.chunk // BLOCK_TOKENS
    served, skipped = [], 0
    for prompt in job.prompts:
        answer, kept = serve(layer, prompt, admitted_blocks(len(prompt), arm.admission, every))
        served.append(answer)
        skipped += not kept
    return Played(served, layer.evicted_states, skipped)


def _most_kv(prompts: Sequence[Sequence[int]]) -> int:
    """Return with how many blocks none ever goes: more would only take time.

    All there are, and those of a prompt that are computed before they are found resident.
    """
    return len(set().union(*prompts)) + max(map(len, prompts), default=1)


def _is_own_int8(arm: Arm) -> bool:
    return arm.policy == "stock" and arm.pool == "int8"


@contextmanager
def _plugin(arm: Arm) -> Iterator[None]:
    """Have the plugin in place while a cache is built, unless the arm is SGLang alone."""
    if arm.policy == "stock":
        yield
        return
    from statecache_sglang.install import install

    given: dict[str, Any] = {
        "kv_cache_plugin": "statecache",
        "policy": arm.policy,
        "cost": cost_text(scaled_cost(arm.cost_model(), BLOCK_TOKENS)),
    }
    if arm.pool == "int8":
        given |= {"checkpoints": "int8", "checkpoint_slots": arm.states}
    installed = install(Settings.from_given(given, {}))
    try:
        yield
    finally:
        installed.remove()


def serve(layer: Any, prompt: Sequence[int], depths: Sequence[int]) -> tuple[Served, bool]:
    """Serve one request as the scheduler does; states are cached at `depths` beyond its hit.

    Tells what was found, and whether every state was kept. Without KV for it a request is rejected,
    which keeps what was cached until then.
    """
    from statecache_sglang.bench.cache_layer import NoRoomError

    blocks = len(prompt)
    # SGLang computes the last token of a prompt always (Req._compute_max_prefix_len).
    node, hit, resident = layer.match(prompt[:-1])
    layer.requested(prompt, node, depths)
    found = Served.of_blocks(blocks, resident, hit)
    lock = layer.lock(node)
    at = hit
    try:
        for depth in [*(depth for depth in depths if depth > hit), blocks]:
            if depth == at:
                break
            try:
                fresh = layer.compute(depth - at)
            except NoRoomError:
                return Served(found.prompt_tokens, 0, 0, rejected=True), True
            if depth not in depths:
                layer.release(fresh)
                break
            try:
                node = layer.cache(prompt[:depth], at, lock[0], fresh, end=depth == depths[-1])
            except NoRoomError:
                layer.release(fresh)
                return found, False
            layer.unlock(lock)
            lock = layer.lock(node)
            at = depth
    finally:
        layer.unlock(lock)
    return found, True


if __name__ == "__main__":
    main()
