"""Prefill chunks that end where a state is wanted.

vLLM 0.32 keeps a state only where a chunk ends. Its scheduler ends chunks at block boundaries that
the token budget picks, so the states that `prefix_cache_retention_interval` asks for exist only
where one of them happens to fall on a multiple of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from statecache_vllm.guard import Guard
from statecache_vllm.seams import SplitPatch

__all__ = ["clip", "end_chunks_at"]

_patch: SplitPatch | None = None


def clip(start: int, tokens: int, interval: int) -> int:
    """Return how many of `tokens` to compute so that no multiple of `interval` is run past."""
    boundary = (start // interval + 1) * interval
    return boundary - start if boundary < start + tokens else tokens


def end_chunks_at(interval: int, guard: Guard) -> None:
    """Have the schedulers of this process end prefill chunks at multiples of `interval`."""
    global _patch
    if _patch is not None:
        _patch.remove()
        _patch = None
    if interval:
        _patch = SplitPatch(_around(interval, guard))
        _patch.install()


def _around(interval: int, guard: Guard) -> Callable[..., int]:
    def end(tokens: int, request: Any, found: int) -> int:
        start = int(request.num_computed_tokens) + found
        if start >= max(request.num_prompt_tokens, request.num_tokens - 1):
            return tokens  # decoding
        return clip(start, tokens, interval)

    guarded_end = guard.wrap(end, lambda tokens, *_: tokens)

    def split(
        original: Callable[..., int],
        scheduler: Any,
        request: Any,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        found = (num_new_local_computed_tokens, num_external_computed_tokens)
        tokens = original(scheduler, request, num_new_tokens, *found)
        return guarded_end(tokens, request, sum(found))

    return split
