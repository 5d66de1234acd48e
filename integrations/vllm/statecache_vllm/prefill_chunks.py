"""Prefill chunks that end where a state is wanted.

vLLM 0.32 keeps a state only where a chunk ends. Its scheduler ends chunks at block boundaries that
the token budget picks, so the states that `prefix_cache_retention_interval` asks for exist only
where one of them happens to fall on a multiple of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from statecache.engine.settings import Settings, flag_of
from statecache.errors import SettingsError, exit_engine
from statecache_vllm.guard import Guard
from statecache_vllm.seams import patch_split, planner_of

__all__ = ["check_interval", "clip", "end_chunks", "offered_blocks", "path_of", "settle_interval"]

_DEFAULT_INTERVAL = 8192


def check_interval(settings: Settings, block: int) -> None:
    """Raise `SettingsError` if states are wanted inside blocks of `block` tokens."""
    wanted = settings.checkpoint_interval
    if wanted is not None and wanted % block:
        raise SettingsError(
            f"{flag_of('checkpoint_interval')} {wanted} must be a multiple of the block size,"
            f" {block} tokens"
        )


def settle_interval(settings: Settings, cache_config: Any, kv_cache_config: Any) -> int:
    """Set after how many tokens vLLM keeps a state; never denser than the user's own setting.

    `prefix_cache_retention_interval` of vLLM 0.32: None keeps every one, 0 only prompt ends and
    junctions. The block size is known only now: vLLM enlarges it for a hybrid model after it has
    made its configuration. Returns the interval in force, 0 for none.
    """
    block = math.lcm(*(g.kv_cache_spec.block_size for g in kv_cache_config.kv_cache_groups))
    wanted = settings.checkpoint_interval
    if settings.admission == "branch-points":
        # vLLM itself ends a chunk, and keeps a state, where the KV of a prompt parts from what is
        # cached: a junction. 0 leaves these and prompt ends alone.
        cache_config.prefix_cache_retention_interval = 0
        kv_cache_config.prefix_cache_retention_interval = 0
        return 0
    if wanted is None or (wanted == 0 and settings.admission == "dense"):
        many = settings.checkpoints is not None or settings.admission == "dense"
        wanted = -(-_DEFAULT_INTERVAL // block) * block if many else 0
    try:
        check_interval(settings, block)
    except SettingsError as error:
        exit_engine(error)
    own = cache_config.prefix_cache_retention_interval
    if wanted == 0:
        return own or 0
    interval = max(wanted, own) if own else wanted
    cache_config.prefix_cache_retention_interval = interval
    kv_cache_config.prefix_cache_retention_interval = interval
    return int(interval)


def path_of(block: int, hashes_a_block: int) -> Callable[[Any, int], list[bytes]]:
    """Return what gives one hash for each full block of the first tokens of a request."""

    def path(request: Any, tokens: int) -> list[bytes]:
        step, hashes = hashes_a_block, request.block_hashes
        count = min(tokens // block, len(hashes) // step)
        return list(hashes[step - 1 : count * step : step])

    return path


def offered_blocks(every: int, blocks: int) -> list[int]:
    """Return after how many blocks of a prompt states will be offered, as far as is known."""
    between = range(every, blocks, every) if every else ()
    return [*between, blocks] if blocks else []


def clip(start: int, tokens: int, interval: int) -> int:
    """Return how many of `tokens` to compute so that no multiple of `interval` is run past."""
    boundary = (start // interval + 1) * interval
    return boundary - start if boundary < start + tokens else tokens


def end_chunks(interval: int, guard: Guard) -> Callable[[int, Any, int], int]:
    """Return what ends the prefill chunks of one scheduler at multiples of `interval`.

    It takes the tokens that vLLM would compute, the request, and how many were found for it.
    """

    def end(tokens: int, request: Any, found: int) -> int:
        start = int(request.num_computed_tokens) + found
        if start >= max(request.num_prompt_tokens, request.num_tokens - 1):
            return tokens  # decoding
        return clip(start, tokens, interval)

    def as_it_was(tokens: int, *_: object) -> int:
        return tokens

    if not interval:
        return as_it_was
    patch_split(_split)
    return guard.wrap(end, as_it_was)


def _split(
    original: Callable[..., int],
    scheduler: Any,
    request: Any,
    num_new_tokens: int,
    num_new_local_computed_tokens: int = 0,
    num_external_computed_tokens: int = 0,
) -> int:
    found = (num_new_local_computed_tokens, num_external_computed_tokens)
    tokens = original(scheduler, request, num_new_tokens, *found)
    planner = planner_of(scheduler)  # None in an engine without the plugin, in the same process
    return tokens if planner is None else int(planner.end_chunk(tokens, request, sum(found)))
