"""The state slots of running requests, the pools behind them and the bytes they take."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

from statecache.engine.seams import has
from statecache.errors import exit_engine
from statecache_sglang import engine_paths as at
from statecache_sglang.pool_views import (
    Checkpoints,
    Configurator,
    RequestPool,
    StateAllocator,
    StateParameters,
    Tensor,
)
from statecache_sglang.seams import load
from statecache_sglang.views import (
    CacheParameters,
    InvariantChecker,
    Request,
    TreeCache,
)

__all__ = [
    "NO_CHECKPOINT",
    "NO_SLOT",
    "allocating_for",
    "bytes_of_a_state",
    "checkpoint_grid",
    "checkpoint_pool",
    "count_slots_in_use",
    "device_of",
    "draft_states",
    "evict_checkpoint",
    "evict_states",
    "free_state_slots",
    "give_back_state",
    "is_hybrid_pool",
    "last_state_depth",
    "missing_state_slots",
    "pool_sizes",
    "requested_state_slots",
    "set_checkpoint_pool",
    "side_bytes_of_a_state",
    "side_states",
    "state_capacity",
    "state_layout",
    "temporal_and_conv",
    "tracked_depth",
    "without_states",
]

# What SGLang asserts when no slot can be had (MambaComponent._alloc_mamba_slot,
# _alloc_int8_ckpt_slot).
NO_SLOT = "Can not alloc mamba cache"
NO_CHECKPOINT = "Can not alloc int8 mamba checkpoint slot"


# Slots.


def is_hybrid_pool(pool: object) -> bool:
    """Whether requests of this pool hold recurrent states."""
    return isinstance(pool, load(at.POOL).HybridReqToTokenPool)


def free_state_slots(allocator: StateAllocator) -> int:
    """Return how many slots `alloc(1)` could still give, those set aside for a batch included."""
    set_aside = operator.length_hint(allocator._alloc_iter or ())  # noqa: SLF001
    return int(allocator.schedulable_available_size()) + set_aside


def missing_state_slots(pool: RequestPool, req: Request) -> int:
    """Return how many slots `HybridReqToTokenPool.alloc` will take for this request."""
    needed = 0 if req.kv.holds_mamba else 1
    if req.kv.mamba_ping_pong_track_buffer is None:
        needed += pool.mamba_initial_tracking_slots
    return needed


def allocating_for(req: Request) -> tuple[Request, ...]:
    """Return what `MambaComponent._alloc_mamba_slot` takes: since SGLang 0.5.23 the request."""
    return (req,) if has(f"{at.COMPONENTS}:MambaComponent._alloc_mamba_slot", "req") else ()


def evict_states(cache: TreeCache, count: int) -> None:
    """Have SGLang make room for so many state slots."""
    params = load(at.PREFIX_CACHE).EvictParams
    cache.evict_for_alloc(params(num_tokens=0, mamba_num=count))


def evict_checkpoint(cache: TreeCache) -> None:
    """Have SGLang drop one state of the checkpoint pool."""
    cache.evict(load(at.PREFIX_CACHE).EvictParams(num_tokens=0, mamba_num=1))


def without_states(evict_params: Any) -> object:
    """Return the parameters of an eviction without the states they ask for."""
    changed: object = dataclasses.replace(evict_params, mamba_num=0)
    return changed


def count_slots_in_use(checker: InvariantChecker) -> int:
    """Return how many state slots requests hold, by what they say themselves."""
    slots = load(at.STATS).kv_mamba_slots
    return sum(slots(req.kv) for req in checker._requests_owning_rows())  # noqa: SLF001


def last_state_depth(cache: TreeCache, tokens: int) -> int:
    """Return where in a prompt of so many tokens its last state can be cached."""
    if not cache.enable_mamba_extra_buffer:
        return tokens
    grid = checkpoint_grid(cache)
    return tokens // grid * grid


def checkpoint_grid(cache: TreeCache) -> int:
    """Return the tokens between two places where the extra buffer can have a state."""
    grid: int = load(at.CONTEXT).mamba_checkpoint_grid(cache.page_size)
    return grid


def tracked_depth(cache: TreeCache, req: Request) -> int | None:
    """Return where the extra buffer will have a state in the next chunk of a request, if anywhere.

    As `ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend` of SGLang 0.5.23, without DCP.
    """
    grid = checkpoint_grid(cache)
    begin, end = req.prefix_len, req.extend_end
    if end - begin < grid:
        return None
    branching = req.mamba_branching_seqlen
    if branching is not None and begin < branching < end and (branching - begin) % grid == 0:
        return branching
    return begin + (end - begin) // grid * grid


def give_back_state(pool: RequestPool, req: Request) -> None:
    """Take from a queued request the slot that its match got it, as SGLang does in its own loop."""
    req.kv.mamba_cow_src_index = None
    req.kv.mamba_needs_clear = False
    slot = req.kv.mamba_pool_idx
    if slot is not None:
        pool.mamba_allocator.free(slot.unsqueeze(-1))
        req.kv.mamba_pool_idx = None


# Pools.


def checkpoint_pool(pool: RequestPool) -> Checkpoints | None:
    """Return the int8 pool; None where there is none, or no recurrent state at all."""
    return getattr(pool, "mamba_ckpt_pool", None)


def set_checkpoint_pool(pool: RequestPool, checkpoints: Checkpoints) -> None:
    """Have cached states live in this pool."""
    pool.mamba_ckpt_pool = checkpoints


def state_capacity(params: CacheParameters) -> int:
    """Return how many states a cache that is about to be built can hold at most."""
    pool = params.req_to_token_pool
    checkpoints = checkpoint_pool(pool)
    return int(pool.mamba_pool.size if checkpoints is None else checkpoints.num_slots)


def pool_sizes(cache: TreeCache) -> tuple[int, int, Checkpoints | None]:
    """Return the size and the free slots of the pool of running requests, and the int8 pool."""
    pool = cache.req_to_token_pool
    return (
        int(pool.mamba_pool.size),
        int(pool.mamba_allocator.available_size()),
        checkpoint_pool(pool),
    )


def device_of(pool: RequestPool) -> object:
    """Return the device the slots of `pool` live on."""
    return pool.mamba_pool.mamba_cache.temporal.device


def temporal_and_conv(pool: RequestPool) -> tuple[Tensor, list[Tensor]]:
    """Return the temporal tensor and the convolution tensors, each `[layers, slots + 1, ...]`."""
    cache = pool.mamba_pool.mamba_cache
    return cache.temporal, list(cache.conv)


def side_states(pool: RequestPool) -> dict[str, tuple[Tensor, int]]:
    """Return the states kept beside the pool by the same slot, and their slot dimension.

    `ShortConvPool` and `NGramPool` of mem_cache/ple_state_pool.py; any other is refused.
    """
    found: dict[str, tuple[Tensor, int]] = {}
    for sibling in pool.mamba_pool._slot_siblings:  # noqa: SLF001
        if sibling is pool.short_conv_pool:
            found["short_conv"] = (pool.short_conv_pool.conv_state, 1)
        elif sibling is pool.ngram_pool:
            found["ngram"] = (pool.ngram_pool.context, 0)
        else:
            exit_engine(
                f"--statecache-checkpoints int8 does not know the state {type(sibling).__name__}"
            )
    return found


# Bytes.


def state_layout(configurator: Configurator) -> tuple[int, StateParameters]:
    """Return the number of state layers and SGLang's shapes and types of one layer's state."""
    params = configurator.mambaish_config.mamba2_cache_params
    return len(params.layers), params


def bytes_of_a_state(configurator: Configurator) -> int:
    """Return the bytes SGLang counts for one slot of its own pool, side states included.

    As `KVCacheConfigurator._handle_max_mamba_cache` of SGLang 0.5.23, without pipeline parallelism.
    """
    params = configurator.mambaish_config.mamba2_cache_params
    return int(params.mamba_cache_per_req) + side_bytes_of_a_state(configurator)


def side_bytes_of_a_state(configurator: Configurator) -> int:
    """Return the bytes of the side states of one slot."""
    return int(configurator.extra_mamba_cache_bytes_per_req)


def draft_states(configurator: Configurator) -> tuple[int, int]:
    """Return how many states a verify step keeps, and for one of how many slots; 0 of 1 without.

    As `KVCacheConfigurator._handle_max_mamba_cache` of SGLang 0.5.23, without ReplaySSM.
    """
    if configurator.spec_algorithm.is_none():
        return 0, 1
    drafts = load(at.CONTEXT).get_spec().speculative_num_draft_tokens
    return int(drafts), int(configurator._calculate_mamba_ratio())  # noqa: SLF001


def requested_state_slots() -> tuple[int | None, float]:
    """Return --max-mamba-cache-size, None when not given, and --mamba-full-memory-ratio."""
    schedule = load(at.CONTEXT).get_schedule()
    return schedule.max_mamba_cache_size, float(schedule.mamba_full_memory_ratio)
