"""What the state pools need of SGLang."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from statecache.engine.metrics import Exporter, PrometheusClasses
from statecache.errors import exit_engine
from statecache_sglang import engine_paths as at
from statecache_sglang.seams import AroundPatch, load

__all__ = [
    "BudgetPatch",
    "CheckerPatch",
    "EvictionPatch",
    "PoolPatch",
    "asked_state_slots",
    "bytes_of_a_state",
    "device_of",
    "exporter",
    "pinned_states",
    "pool_sizes",
    "side_bytes_of_a_state",
    "side_states",
    "slots_in_use",
    "state_layout",
    "temporal_and_conv",
]


def temporal_and_conv(pool: Any) -> tuple[Any, list[Any]]:
    """Return the temporal tensor and the convolution tensors, each `[layers, slots + 1, ...]`."""
    cache = pool.mamba_pool.mamba_cache
    return cache.temporal, list(cache.conv)


def side_states(pool: Any) -> dict[str, tuple[Any, int]]:
    """Return the states kept beside the pool by the same slot, and their slot dimension.

    `ShortConvPool` and `NGramPool` of mem_cache/ple_state_pool.py; any other is refused.
    """
    found: dict[str, tuple[Any, int]] = {}
    for sibling in pool.mamba_pool._slot_siblings:  # noqa: SLF001
        if sibling is pool.short_conv_pool:
            found["short_conv"] = (sibling.conv_state, 1)
        elif sibling is pool.ngram_pool:
            found["ngram"] = (sibling.context, 0)
        else:
            exit_engine(
                f"--statecache-checkpoints int8 does not know the state {type(sibling).__name__}"
            )
    return found


def state_layout(configurator: Any) -> tuple[int, Any]:
    """Return the number of state layers and SGLang's shapes and types of one layer's state."""
    params = configurator.mambaish_config.mamba2_cache_params
    return len(params.layers), params


def bytes_of_a_state(configurator: Any) -> int:
    """Return the bytes SGLang counts for one slot of its own pool, side states included.

    As `KVCacheConfigurator._handle_max_mamba_cache` of SGLang 0.5.23, without pipeline parallelism.
    """
    params = configurator.mambaish_config.mamba2_cache_params
    return int(params.mamba_cache_per_req) + side_bytes_of_a_state(configurator)


def side_bytes_of_a_state(configurator: Any) -> int:
    """Return the bytes of the side states of one slot."""
    return int(configurator.extra_mamba_cache_bytes_per_req)


def asked_state_slots() -> tuple[int | None, float]:
    """Return --max-mamba-cache-size, None when not given, and --mamba-full-memory-ratio."""
    schedule = load(at.CONTEXT).get_schedule()
    return schedule.max_mamba_cache_size, float(schedule.mamba_full_memory_ratio)


def state_slots(params: Any) -> int:
    """Return how many states a cache that is about to be built can hold at most."""
    pool = params.req_to_token_pool
    checkpoints = getattr(pool, "mamba_ckpt_pool", None)
    return int(pool.mamba_pool.size if checkpoints is None else checkpoints.num_slots)


def last_state(cache: Any, tokens: int) -> int:
    """Return where in a prompt of so many tokens its last state can be cached."""
    if not cache.enable_mamba_extra_buffer:
        return tokens
    grid: int = load(at.CONTEXT).mamba_checkpoint_grid(cache.page_size)
    return tokens // grid * grid


def pool_sizes(cache: Any) -> tuple[int, int, Any]:
    """Return the size and the free slots of the pool of running requests, and the int8 pool."""
    pool = cache.req_to_token_pool
    return (
        int(pool.mamba_pool.size),
        int(pool.mamba_allocator.available_size()),
        getattr(pool, "mamba_ckpt_pool", None),
    )


def pinned_states(cache: Any) -> int:
    """Return how many states of the tree are locked."""
    return int(cache.mamba_protected_size())


def exporter() -> Callable[[dict[str, float]], None] | None:
    """Return what takes changes for the metrics of this scheduler, None where it shows none.

    prometheus_client is imported here and not before: SGLang 0.5.23 names the folder its processes
    share when it starts the engine. As SGLang's own, the metrics are those of one rank of several.
    """
    context = load(at.CONTEXT)
    asked, parallel = context.get_observability(), context.get_parallel()
    reports = parallel.attn_tp_rank == 0 or asked.enable_metrics_for_all_schedulers
    if not (asked.enable_metrics and reports):
        return None
    client = load("prometheus_client")
    classes = PrometheusClasses(client.Counter, client.Gauge, client.Histogram)
    model = context.get_serving().served_model_name
    return Exporter(classes, "sglang", str(model), parallel.tp_rank).apply


def slots_in_use(checker: Any) -> int:
    """Return how many state slots requests hold, by what they say themselves."""
    slots = load(at.STATS).kv_mamba_slots
    return sum(slots(req.kv) for req in checker._requests_owning_rows())  # noqa: SLF001


def device_of(pool: Any) -> Any:
    """Return the device the slots of `pool` live on."""
    return pool.mamba_pool.mamba_cache.temporal.device


class PoolPatch:
    """Has `make(pool)` build the checkpoint pool in place of SGLang's own."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        def no_own_pool(_original: Any, **_kwargs: Any) -> None:
            return None

        def init(original: Any, pool: Any, *args: Any, **kwargs: Any) -> None:
            original(pool, *args, **kwargs)
            pool.mamba_ckpt_pool = make(pool)

        self._swaps = (
            AroundPatch(load(at.CHECKPOINTS), "maybe_init_int8_mamba_checkpoint_pool", no_own_pool),
            AroundPatch(load(at.POOL).HybridReqToTokenPool, "_init_mamba_pool", init),
        )

    def install(self) -> None:
        """Take the place."""
        for swap in self._swaps:
            swap.install()

    def remove(self) -> None:
        """Give it back."""
        for swap in self._swaps:
            swap.remove()


class EvictionPatch(AroundPatch):
    """Keeps a shortage of active slots from destroying checkpoints, which free no active slot.

    `UnifiedRadixCache.evict_for_alloc` of SGLang 0.5.23 compares the shortage with the active
    pool, but the states it drops lie in the checkpoint pool.
    """

    def __init__(self) -> None:
        def evict_for_alloc(original: Any, cache: Any, params: Any, *args: Any, **kw: Any) -> Any:
            if getattr(cache.req_to_token_pool, "mamba_ckpt_pool", None) is not None:
                params = dataclasses.replace(params, mamba_num=0)
            return original(cache, params, *args, **kw)

        super().__init__(load(at.CACHE).UnifiedRadixCache, "evict_for_alloc", evict_for_alloc)


class BudgetPatch(AroundPatch):
    """Takes the pool off the memory SGLang divides between states and KV, in GiB."""

    def __init__(self, take_off: Callable[[Any, float], float]) -> None:
        def handle(original: Any, configurator: Any, total_rest_memory: float) -> Any:
            return original(configurator, take_off(configurator, total_rest_memory))

        owner = load(at.CONFIGURATOR).KVCacheConfigurator
        super().__init__(owner, "_handle_max_mamba_cache", handle)


class CheckerPatch(AroundPatch):
    """Puts `around(original, checker, stats)` where SGLang checks the state pools.

    The scheduler does so whenever it is idle (`SchedulerInvariantChecker._check_all_pools`), and
    stops the server, or warns, when the first value returned is True.
    """

    def __init__(self, around: Callable[..., tuple[bool, str]]) -> None:
        owner = load(at.CHECKER).SchedulerInvariantChecker
        super().__init__(owner, "_check_mamba_pool", around)
