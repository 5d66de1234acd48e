"""SGLang's cache layer on its own: the real `UnifiedRadixCache` over real pools, without a model.

Attention plus recurrent layers, tiny states, page size 1. The names and calls are those of SGLang
0.5.23; the scheduler's part, matching, locking, taking slots and caching, is done here.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from statecache_sglang.pool_views import Tensor
from statecache_sglang.scheduler_side import scheduler_side_of
from statecache_sglang.seams import load
from statecache_sglang.seams.server_args import request_int8_pool, set_chunk_size
from statecache_sglang.views import (
    LockParameters,
)

__all__ = ["CacheLayer", "NoRoomError", "build_pools"]

# Torch is the engine's, and not there where this package is only checked.
torch: Any = import_module("torch")

_MEMORY = "sglang.srt.mem_cache"


class NoRoomError(Exception):
    """No slot, or no KV, could be had: all the rest is in use."""


HeldLock = tuple[int, LockParameters]


def _state_shape() -> Any:
    mamba = load("sglang.srt.configs.mamba_utils")
    shape = mamba.Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=32,
        n_groups=1,
        num_heads=2,
        head_dim=16,
        state_size=16,
        conv_kernel=4,
    )
    with load("sglang.srt.environ").envs.SGLANG_MAMBA_SSM_DTYPE.override("bfloat16"):
        return mamba.Mamba2CacheParams(shape=shape, layers=[0, 1])


def build_pools(
    slots: int,
    kv_tokens: int,
    *,
    states_per_path: int = 0,
    own_int8_slots: int = 0,
    page_size: int = 1,
    **options: object,
) -> tuple[Any, Any, Any]:
    """Return SGLang's pools for `slots` states and `kv_tokens` tokens, and what a state is.

    The pool of requests and states, the allocator of KV, and the states' `Mamba2CacheParams`. The
    rest is as for `CacheLayer`; KV lies on pages of `page_size` tokens, more than one only with the
    extra buffer; `options` are more arguments of the pool of requests.
    """
    arguments = load("sglang.srt.server_args")
    server_args = arguments.ServerArgs(
        model_path="dummy", page_size=page_size, mamba_max_states_per_path=states_per_path or -1
    )
    if own_int8_slots:
        request_int8_pool(server_args, own_int8_slots)
    set_chunk_size(server_args, 64)
    arguments.set_global_server_args_for_scheduler(server_args)
    pools, states = load(f"{_MEMORY}.memory_pool"), _state_shape()
    requests = pools.HybridReqToTokenPool(
        mamba_size=slots,
        mamba_spec_state_size=8,
        device="cpu",
        enable_memory_saver=False,
        cache_params=states,
        mamba_layer_ids=[0, 1],
        **{"size": 8, "max_context_len": 1024, "enable_mamba_extra_buffer": False}
        | {"speculative_num_draft_tokens": 3, **options},
    )
    kv = pools.HybridLinearKVPool(
        size=kv_tokens,
        dtype=torch.bfloat16,
        page_size=page_size,
        head_num=1,
        head_dim=2,
        full_attention_layer_ids=[2],
        device="cpu",
        enable_memory_saver=False,
        mamba_pool=requests.mamba_pool,
    )
    allocators = load(f"{_MEMORY}.allocator")
    shared = {"dtype": torch.bfloat16, "device": "cpu", "kvcache": kv, "need_sort": False}
    if page_size > 1:
        allocator = allocators.PagedTokenToKVPoolAllocator(kv_tokens, page_size, **shared)
    else:
        allocator = allocators.TokenToKVPoolAllocator(kv_tokens, **shared)
    return requests, allocator, states


class CacheLayer:
    """A cache of `slots` states and `kv_tokens` tokens of KV, built with what is installed.

    `core` names the tree core; None leaves the choice to SGLang. `states_per_path` is its
    --mamba-max-states-per-path, 0 for none. With `own_int8_slots` states are kept in so many slots
    of its own int8 pool; the plugin, where it is installed, brings one itself.
    """

    def __init__(
        self,
        slots: int,
        kv_tokens: int,
        core: str | None = None,
        *,
        states_per_path: int = 0,
        own_int8_slots: int = 0,
    ) -> None:
        requests, self._allocator, _ = build_pools(
            slots, kv_tokens, states_per_path=states_per_path, own_int8_slots=own_int8_slots
        )
        full, mamba = (
            load(f"{_MEMORY}.unified_cache.component_type").ComponentType[name]
            for name in ("FULL", "MAMBA")
        )
        self._base = load(f"{_MEMORY}.base_prefix_cache")
        self._key = load(f"{_MEMORY}.radix_cache").RadixKey
        self._cache = load(f"{_MEMORY}.unified_radix_cache").UnifiedRadixCache(
            params=load(f"{_MEMORY}.cache_init_params").CacheInitParams(
                req_to_token_pool=requests,
                token_to_kv_pool_allocator=self._allocator,
                page_size=1,
                disable=False,
                tree_components=(full, mamba),
                enable_mamba_extra_buffer=False,
                tree_core_backend=core,
            )
        )
        checkpoints = requests.mamba_ckpt_pool
        self._states = requests.mamba_allocator if checkpoints is None else checkpoints
        self.evicted_states = 0

    def match(self, tokens: Sequence[int]) -> tuple[int, int, int]:
        """Return the node to resume from, its depth, and how far KV is resident."""
        found = self._cache.match_prefix(self._base.MatchPrefixParams(key=self._tokens(tokens)))
        return found.best_match_node, found.device_prefix_len, found.full_kv_hit_length

    def requested(self, tokens: Sequence[int], node: int, depths: Sequence[int]) -> None:
        """A request is admitted that resumes at `node`; it will cache states at `depths`.

        As the scheduler's admission tells a policy that needs prompts.
        """
        side = scheduler_side_of(self._cache)
        if side is not None:
            side.on_prompt(array("q", tokens), b"", node, depths)

    def lock(self, node: int) -> HeldLock:
        """Keep what a running request needs; give the result to `unlock`."""
        return node, self._cache.inc_lock_ref(node).to_dec_params()

    def unlock(self, lock: HeldLock) -> None:
        """The running request has moved on."""
        self._cache.dec_lock_ref(*lock)

    def compute(self, tokens: int) -> Tensor:
        """Take KV slots for so many tokens. Raises `NoRoomError`."""
        missing = tokens - self._allocator.available_size()
        if missing > 0:
            self._cache.evict(self._base.EvictParams(num_tokens=missing, mamba_num=0))
        taken = self._allocator.alloc(tokens)
        if taken is None:
            raise NoRoomError("KV")
        slots: Tensor = taken
        return slots

    def release(self, taken: Tensor) -> None:
        """Give back KV slots that are not cached."""
        self._allocator.free(taken)

    def cache(
        self, tokens: Sequence[int], hit: int, node: int, fresh: Tensor, *, end: bool = True
    ) -> int:
        """Cache `tokens` and the state at their end; they go on from `node`, at `hit`.

        `end` says that this is the end of a prompt.

        Returns the node of the state. Raises `NoRoomError` if every state is in use.
        """
        slot = self._states.alloc(1)
        if slot is None:
            found = self._cache.evict(self._base.EvictParams(num_tokens=0, mamba_num=1))
            self.evicted_states += found.mamba_num_evicted
            slot = self._states.alloc(1)
        if slot is None:
            raise NoRoomError("states")
        values = torch.cat([self._cache.path_device_indices(node)[:hit], fresh])
        params = self._base.InsertParams(
            key=self._tokens(tokens), value=values, mamba_value=slot, prev_prefix_len=hit
        )
        params.statecache_end = end
        free = self._states.available_size()
        result = self._cache.insert(params)
        self.evicted_states += self._states.available_size() - free  # those above the limit
        if result.mamba_exist:
            self._states.free(slot)
        cached_at: int = result.last_device_node
        return cached_at

    def _tokens(self, tokens: Sequence[int]) -> Any:
        return self._key(array("q", tokens), None, cache_salt=None)
