"""Prefill chunks that end where a state is wanted.

vLLM 0.32 keeps a state only where a chunk ends. Its scheduler ends chunks at block boundaries that
the token budget picks, so the states that `prefix_cache_retention_interval` asks for exist only
where one of them happens to fall on a multiple of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from statecache.engine.faults import FaultBarrier, guarded
from statecache.engine.patching import PatchSet
from statecache.engine.settings import Settings, flag_of
from statecache.errors import SettingsError, exit_engine
from statecache_vllm.patches import END_PREFILL_CHUNK
from statecache_vllm.views import CacheConfig, KVCacheConfig, Request, Scheduler

__all__ = ["ChunkEnds", "check_interval", "clip", "settle_interval"]

_DEFAULT_INTERVAL = 8192


def check_interval(settings: Settings, block: int) -> None:
    """Raise `SettingsError` if states are wanted inside blocks of `block` tokens."""
    wanted = settings.checkpoint_interval
    if wanted is not None and wanted % block:
        raise SettingsError(
            f"{flag_of('checkpoint_interval')} {wanted} must be a multiple of the block size,"
            f" {block} tokens"
        )


def settle_interval(
    settings: Settings, cache_config: CacheConfig, kv_cache_config: KVCacheConfig
) -> int:
    """Set after how many tokens vLLM keeps a state; never denser than the user's own setting.

    `prefix_cache_retention_interval` of vLLM 0.32: None keeps every one, 0 only prompt ends and
    branch points. The block size is known only now: vLLM enlarges it for a hybrid model after it
    has made its configuration. Returns the interval in force, 0 for none.
    """
    block = math.lcm(*(g.kv_cache_spec.block_size for g in kv_cache_config.kv_cache_groups))
    wanted = settings.checkpoint_interval
    if settings.admission == "branch-points":
        # vLLM itself ends a chunk, and keeps a state, where the KV of a prompt parts from what is
        # cached: a branch point. 0 leaves these and prompt ends alone.
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


def clip(start: int, tokens: int, interval: int) -> int:
    """Return how many of `tokens` to compute so that no multiple of `interval` is run past."""
    boundary = (start // interval + 1) * interval
    return boundary - start if boundary < start + tokens else tokens


class ChunkEnds:
    """Ends the prefill chunks of one scheduler at multiples of `interval`, 0 for as vLLM does."""

    def __init__(self, interval: int, faults: FaultBarrier) -> None:
        self.faults = faults
        self._interval = interval
        if interval:
            _END_PREFILL_CHUNK.install()  # stays for the process: schedulers without us pass it

    def _as_vllm_does(self, tokens: int, *_: object) -> int:
        return tokens

    @guarded(_as_vllm_does)
    def end(self, tokens: int, request: Request, found: int) -> int:
        """Return how many of `tokens` to compute for a request of which `found` were found."""
        if not self._interval:
            return tokens
        start = int(request.num_computed_tokens) + found
        if start >= max(request.num_prompt_tokens, request.num_tokens - 1):
            return tokens  # decoding
        return clip(start, tokens, self._interval)


def _end_prefill_chunk(
    original: Callable[..., int],
    scheduler: Scheduler,
    request: Request,
    num_new_tokens: int,
    num_new_local_computed_tokens: int = 0,
    num_external_computed_tokens: int = 0,
) -> int:
    """Around `Scheduler._mamba_block_aligned_split`, of every scheduler in this process."""
    found = (num_new_local_computed_tokens, num_external_computed_tokens)
    tokens = original(scheduler, request, num_new_tokens, *found)
    connector = getattr(scheduler, "connector", None)
    ours = getattr(connector, "scheduler_side", None)
    return tokens if ours is None else int(ours.chunk_ends.end(tokens, request, sum(found)))


_END_PREFILL_CHUNK = PatchSet([END_PREFILL_CHUNK.wrapped_by(_end_prefill_chunk)])
