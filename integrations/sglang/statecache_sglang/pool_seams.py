"""What the int8 pool uses of SGLang: the second and last file that takes anything from it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from statecache_sglang import seam_table as at
from statecache_sglang.seams import load

__all__ = [
    "BudgetPatch",
    "EvictionPatch",
    "PoolPatch",
    "device_of",
    "side_states",
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
            raise SystemExit(
                f"statecache: --statecache-int8 does not know the state {type(sibling).__name__}"
            )
    return found


def state_layout(configurator: Any) -> tuple[int, Any]:
    """Return the number of state layers and SGLang's shapes and types of one layer's state."""
    params = configurator.mambaish_config.mamba2_cache_params
    return len(params.layers), params


def device_of(pool: Any) -> Any:
    """Return the device the slots of `pool` live on."""
    return pool.mamba_pool.mamba_cache.temporal.device


class _Swap:
    """One attribute of SGLang replaced, and put back."""

    def __init__(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        self._owner, self._name = owner, name
        self._original = getattr(owner, name)
        self._replacement = replacement

    def install(self) -> None:
        """Replace it."""
        original, replacement = self._original, self._replacement

        @functools.wraps(original)
        def around(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        setattr(self._owner, self._name, around)

    def remove(self) -> None:
        """Put it back."""
        setattr(self._owner, self._name, self._original)


class PoolPatch:
    """Has `make(pool, active slots)` build the checkpoint pool in place of SGLang's own."""

    def __init__(self, make: Callable[[Any, int], Any]) -> None:
        def no_own_pool(_original: Any, **_kwargs: Any) -> None:
            return None

        def init(original: Any, pool: Any, *args: Any, **kwargs: Any) -> None:
            original(pool, *args, **kwargs)
            pool.mamba_ckpt_pool = make(pool, pool.mamba_pool.size)

        self._swaps = (
            _Swap(load(at.CHECKPOINTS), "maybe_init_int8_mamba_checkpoint_pool", no_own_pool),
            _Swap(load(at.POOL).HybridReqToTokenPool, "_init_mamba_pool", init),
        )

    def install(self) -> None:
        """Take the place."""
        for swap in self._swaps:
            swap.install()

    def remove(self) -> None:
        """Give it back."""
        for swap in self._swaps:
            swap.remove()


class EvictionPatch(_Swap):
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


class BudgetPatch(_Swap):
    """Takes the pool off the memory SGLang divides between states and KV, in GiB."""

    def __init__(self, take_off: Callable[[Any, float], float]) -> None:
        def handle(original: Any, configurator: Any, total_rest_memory: float) -> Any:
            return original(configurator, take_off(configurator, total_rest_memory))

        owner = load(at.CONFIGURATOR).KVCacheConfigurator
        super().__init__(owner, "_handle_max_mamba_cache", handle)
