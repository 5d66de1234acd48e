"""Prefill chunks that end where a state is wanted.

vLLM 0.32 keeps a state only where a chunk ends. Its scheduler ends chunks at block boundaries that
the token budget picks, so the states that `prefix_cache_retention_interval` asks for exist only
where one of them happens to fall on a multiple of it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from statecache.engine.faults import guarded
from statecache.engine.patching import PatchSet
from statecache.engine.settings import Settings, flag_of
from statecache.errors import SettingsError, exit_engine
from statecache_vllm.patches import END_PREFILL_CHUNK
from statecache_vllm.views import CacheConfig, KVCacheConfig, Request, Scheduler

if TYPE_CHECKING:
    from statecache_vllm.lookup import Lookup

__all__ = ["ChunkEnds", "check_interval", "clip", "settle_interval"]

_log = logging.getLogger("statecache.vllm")

_DEFAULT_INTERVAL = 8192


def check_interval(settings: Settings, block: int, what: str = "the block size") -> None:
    """Raise `SettingsError` if states are wanted inside blocks of `block` tokens.

    `what` is how the line calls `block`.
    """
    wanted = settings.checkpoint_interval
    if wanted is not None and wanted % block:
        below = wanted // block * block
        legal = f"{below} or {below + block}" if below else str(block)
        raise SettingsError(
            f"{flag_of('checkpoint_interval')} {wanted} must be a multiple of {what},"
            f" {block} tokens: {legal}"
        )


def settle_interval(
    settings: Settings, cache_config: CacheConfig, kv_cache_config: KVCacheConfig, longest: int
) -> int:
    """Set after how many tokens vLLM keeps a state; never denser than the user's own setting.

    `prefix_cache_retention_interval` of vLLM 0.32: None keeps every one, 0 only prompt ends and
    branch points. The block size is known only now: vLLM enlarges it for a hybrid model after it
    has made its configuration. Where the blocks of all groups end together so seldom that no
    prompt, of `longest` tokens at most, would get a state, there is no interval unless one was
    asked for. Returns the interval in force, 0 for none.
    """
    sizes = sorted({group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups})
    block = math.lcm(*sizes)
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
        if wanted > max(_DEFAULT_INTERVAL, longest):
            _log.warning(
                "statecache: states are kept at prompt ends and branch points alone: blocks of"
                " %s tokens end together every %d tokens, and no prompt is so long",
                " and ".join(map(str, sizes)),
                block,
            )
            wanted = 0
    together = f"what blocks of {' and '.join(map(str, sizes))} tokens have in common"
    try:
        check_interval(settings, block, together if len(sizes) > 1 else "the block size")
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
    """Ends the prefill chunks of one scheduler where a state is wanted.

    States lie in blocks of `block` tokens and are wanted every `interval`, 0 for as vLLM does;
    `lookup.heads`, where it is there, says where others wait for one.
    """

    def __init__(self, block: int, interval: int, lookup: Lookup) -> None:
        self.faults = lookup.faults
        self._block, self._interval = block, interval
        self._lookup = lookup
        _END_PREFILL_CHUNK.install()  # stays for the process: schedulers without us pass it

    def _go_on_without(self, *_: object) -> None:
        self._lookup.heads = None

    @guarded(_go_on_without)
    def begin(self, request: Request, start: int, queued: Iterable[Request]) -> None:
        """Before vLLM says how much of a request, computed up to `start`, it computes next."""
        if self._lookup.heads is not None:
            self._lookup.heads.begin_chunk(request, start, queued)

    def _as_vllm_does(self, _request: Request, _start: int, _asked: int, tokens: int) -> int:
        self._lookup.heads = None
        return tokens

    @guarded(_as_vllm_does)
    def end(self, request: Request, start: int, asked: int, tokens: int) -> int:
        """Return how many tokens to compute, where vLLM was `asked` for some and says `tokens`."""
        heads, inside = self._lookup.heads, start % self._block
        if inside:
            # The block that `start` lies in holds the state after `start`, whatever comes of it:
            # run past its end it would be named for a state that nobody wrote.
            tokens = min(tokens, self._block - inside)
        elif heads is not None:
            tokens = heads.without_extra_step(request, start, asked, tokens)
        if self._interval:
            tokens = clip(start, tokens, self._interval)
        if heads is not None and tokens:
            heads.computing(request, start)
        return tokens


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
    connector = getattr(scheduler, "connector", None)
    ours = getattr(getattr(connector, "scheduler_side", None), "chunk_ends", None)
    start = int(request.num_computed_tokens) + sum(found)
    if ours is None or start >= max(request.num_prompt_tokens, request.num_tokens - 1):
        return original(scheduler, request, num_new_tokens, *found)
    ours.begin(request, start, scheduler.waiting)
    tokens = original(scheduler, request, num_new_tokens, *found)
    return int(ours.end(request, start, num_new_tokens, tokens))


_END_PREFILL_CHUNK = PatchSet([END_PREFILL_CHUNK.wrapped_by(_end_prefill_chunk)])
