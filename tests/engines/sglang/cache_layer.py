"""SGLang's real cache layer on a CPU: `UnifiedRadixCache` over real pools, without a model.

Attention plus recurrent layers, tiny states, page size 1 unless a test asks for more: what SGLang
builds for a hybrid model on a CPU. One `Traffic` drives it as the scheduler does and knows which
slots are in use.
"""

from __future__ import annotations

from array import array
from contextlib import contextmanager

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from statecache.checkpoint.proof import Prefix
from statecache.engine.seams import features_off, probe
from statecache.engine.settings import Settings
from statecache.index.keyed_index import TokenPrefixes
from statecache_sglang.bench import cache_layer
from statecache_sglang.seam_table import RUST_LEAD, SEAMS, VIEWS
from statecache_sglang.seams import scheduler as scheduler_seams

FULL, MAMBA = ComponentType.FULL, ComponentType.MAMBA
CORES = ("python", "rust")
# Where the Rust core cannot be led the Python one is built in its place.
LEADS_RUST = RUST_LEAD not in features_off(probe(SEAMS, VIEWS))

# The two kinds of state SGLang keeps by the same slot beside the pool, as Qwen4-Exp has them.
SIDE_STATES = {
    "short_conv_layer_ids": [0, 1],
    "short_conv_state_shape": (16, 3),
    "ngram_context_len": 5,
    "ngram_eos_token_id": 7,
}

# In each of 2 layers, 2 heads of 16 x 16 in bfloat16 and 64 x 3 convolution values; at rest, int8
# and 2 x 16 scales in their place.
STATE_BYTES = {"running": 2 * (1_024 + 384), "at rest": 2 * (512 + 64 + 384)}

torch.set_num_threads(1)


@contextmanager
def plugin(**given):
    """Have the plugin in place while caches are built; without arguments, not at all."""
    if not given:
        yield None
        return
    from statecache_sglang.install import install

    installed = install(Settings.from_given({"kv_cache_plugin": "statecache", **given}, {}))
    try:
        yield installed
    finally:
        installed.remove()


def build_pools(
    slots: int,
    kv_tokens: int,
    states_per_path: int = 0,
    extra_buffer: bool = False,
    side_states: bool = False,
    page_size: int = 1,
    longest: int = 1024,
    rows: int = 8,
    **more,
):
    return cache_layer.build_pools(
        slots,
        kv_tokens,
        states_per_path=states_per_path,
        page_size=page_size,
        max_context_len=longest,
        size=rows,
        enable_mamba_extra_buffer=extra_buffer,
        **(SIDE_STATES if side_states else {}),
        **more,
    )


class Traffic:
    """A cache and what a scheduler does with it, request by request."""

    def __init__(
        self, core: str, slots: int = 64, kv_tokens: int = 20_000, extra_buffer=False, **options
    ):
        self.slots, self.kv_tokens = slots, kv_tokens
        self.requests, self.allocator, self.state_params = build_pools(
            slots, kv_tokens, extra_buffer=extra_buffer, **options
        )
        self.params = CacheInitParams(
            req_to_token_pool=self.requests,
            token_to_kv_pool_allocator=self.allocator,
            page_size=self.allocator.page_size,
            disable=False,
            tree_components=(FULL, MAMBA),
            enable_mamba_extra_buffer=extra_buffer,
            tree_core_backend=core,
        )
        self.cache = UnifiedRadixCache(params=self.params)
        self.core = self.cache.tree_core
        # Where cached states live: the pool of running requests, or the int8 pool.
        checkpoints = self.requests.mamba_ckpt_pool
        self.state_pool = self.requests.mamba_allocator if checkpoints is None else checkpoints
        if checkpoints is not None:
            self.slots = checkpoints.num_slots
        self.held: list = []

    # What a cache is asked for. A subclass may watch.

    @staticmethod
    def key(tokens, extra_key=None, cache_salt=None):
        return RadixKey(array("q", tokens), extra_key, cache_salt=cache_salt)

    def match(self, tokens, **namespace):
        return self.cache.match_prefix(MatchPrefixParams(key=self.key(tokens, **namespace)))

    def lock(self, node):
        return node, self.cache.inc_lock_ref(node).to_dec_params()

    def unlock(self, lock) -> None:
        self.cache.dec_lock_ref(*lock)

    def insert(self, tokens, values, slot, hit, **namespace):
        self.record(tokens, slot, **namespace)
        return self.cache.insert(
            InsertParams(
                key=self.key(tokens, **namespace),
                value=values,
                mamba_value=slot,
                prev_prefix_len=hit,
            )
        )

    def evict(self, states: int = 0, kv_tokens: int = 0) -> int:
        result = self.cache.evict(EvictParams(num_tokens=kv_tokens, mamba_num=states))
        return result.mamba_num_evicted

    def record(self, tokens, slot, extra_key=None, cache_salt=None) -> None:
        """Write down what the state in a slot of the plugin's pool is of, as a store does."""
        records = getattr(self.requests.mamba_ckpt_pool, "records", None)
        if records is not None:
            space = scheduler_seams.namespace(extra_key, cache_salt)
            key = TokenPrefixes.key(array("q", tokens), len(tokens), space)
            records.write(int(slot), Prefix(key, len(tokens)))

    # What a scheduler makes of it.

    def start(self, tokens, **namespace):
        """What can be reused, and a lock on it."""
        match = self.match(tokens, **namespace)
        self.requested(tokens, match.best_match_node, **namespace)
        return match.device_prefix_len, self.lock(match.best_match_node)

    def requested(self, tokens, node, extra_key=None, cache_salt=None) -> None:
        """Tell a policy that needs prompts, as the scheduler's admission does."""
        side = getattr(self.core, "scheduler_side", None)
        if side is not None:
            namespace = scheduler_seams.namespace(extra_key, cache_salt)
            side.on_prompt(array("q", tokens), namespace, node, [len(tokens)])

    def hit(self, tokens, **namespace) -> int:
        return self.match(tokens, **namespace).device_prefix_len

    def state_slot(self):
        """A slot of the state pool, evicting one state when none is free; None when pinned."""
        slot = self.state_pool.alloc(1)
        if slot is None:
            self.evict(states=1)
            slot = self.state_pool.alloc(1)
        return slot

    def kv_slots(self, tokens: int):
        missing = tokens - self.allocator.available_size()
        if missing > 0:
            self.evict(kv_tokens=missing)
        return self.allocator.alloc(tokens)

    def run(self, tokens, pieces: int = 1, **namespace) -> int | None:
        """One request from match to cached states, prefilled in so many pieces.

        Returns its hit, or None when a state or its KV found no room; the pieces cached until
        then stay.
        """
        hit, lock = self.start(tokens, **namespace)
        cached = hit
        try:
            for piece in range(1, pieces + 1):
                end = cached + (len(tokens) - cached) * piece // pieces
                node = self._cache_piece(tokens[:end], cached, lock[0], namespace)
                if node is None:
                    return None
                cached = end
                self.unlock(lock)
                lock = self.lock(node)
        finally:
            self.unlock(lock)
        return hit

    def _cache_piece(self, tokens, cached, node, namespace):
        slot = self.state_slot()
        if slot is None:
            return None
        fresh = self.kv_slots(len(tokens) - cached)
        if fresh is None:
            self.state_pool.free(slot)
            return None
        values = torch.cat([self.cache.path_device_indices(node)[:cached], fresh])
        result = self.insert(tokens, values, slot, cached, **namespace)
        if result.mamba_exist:
            self.state_pool.free(slot)
        return result.last_device_node

    def run_key(self, key) -> int:
        """One request as `run` does it, its key made beforehand: nothing but SGLang's own work."""
        cache, states = self.cache, self.requests.mamba_allocator
        match = cache.match_prefix(MatchPrefixParams(key=key))
        hit, node = match.device_prefix_len, match.best_match_node
        lock = cache.inc_lock_ref(node).to_dec_params()
        slot = states.alloc(1)
        if slot is None:
            cache.evict_for_alloc(EvictParams(num_tokens=0, mamba_num=1))
            slot = states.alloc(1)
        fresh = self.allocator.alloc(len(key) - hit)
        if fresh is None:
            cache.evict_for_alloc(EvictParams(num_tokens=len(key) - hit))
            fresh = self.allocator.alloc(len(key) - hit)
        values = torch.cat([cache.path_device_indices(node)[:hit], fresh])
        result = cache.insert(
            InsertParams(key=key, value=values, mamba_value=slot, prev_prefix_len=hit)
        )
        if result.mamba_exist:
            states.free(slot)
        cache.dec_lock_ref(node, lock)
        return hit

    def abort(self, tokens, **namespace) -> int:
        """A request that is admitted, gets its slots and is aborted before it caches anything."""
        hit, lock = self.start(tokens, **namespace)
        slot = self.state_slot()
        fresh = self.kv_slots(len(tokens) - hit)
        if slot is not None:
            self.state_pool.free(slot)
        if fresh is not None and len(fresh):
            self.allocator.free(fresh)
        self.unlock(lock)
        return hit

    def hold(self, tokens, **namespace) -> None:
        """Lock the node a match of `tokens` ends at, as a running request does."""
        self.held.append(self.start(tokens, **namespace)[1])

    def let_go(self, at: int = 0) -> None:
        self.unlock(self.held.pop(at))

    def flush(self) -> None:
        self.held.clear()
        self.cache.reset()
        self.state_pool.clear()
        self.allocator.clear()

    def state_slots(self) -> list[int]:
        """Slots of the states in the tree, sorted."""
        return sorted(self.core.all_mamba_values_flatten().tolist())

    def sane(self) -> None:
        """SGLang's own invariants."""
        self.cache.sanity_check()

    def check(self) -> None:
        """SGLang's own invariants, and: cached + free = total, for both pools."""
        self.sane()
        cached = self.core.all_mamba_values_flatten().numel()
        assert cached + self.state_pool.available_size() == self.slots
        kv = self.core.all_values_flatten().numel()
        assert kv + self.allocator.available_size() == self.kv_tokens
        side = getattr(self.core, "scheduler_side", None)
        if side is not None:
            assert side.faults.anomalies == 0
            assert len(side.registry) == cached
            side.registry.check()
