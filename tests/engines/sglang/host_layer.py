"""SGLang's real cache layer with its real hierarchical cache (HiCache), on a CPU.

Host pools, controller, acknowledgements and both tree cores are SGLang's; only the copies of bytes
and the pinning of memory are stand-ins (`standins/host_copies.py`).
"""

from __future__ import annotations

import host_copies
from cache_layer import MAMBA, Traffic
from scheduled import request
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

host_copies.install()

WRITE_POLICIES = ("write_through", "write_back")


class HostTraffic(Traffic):
    """A cache with a host tier `ratio` times as big, and what a scheduler does with it."""

    def __init__(self, core: str, write: str, ratio: float = 2.0, **options):
        super().__init__(core, **options)
        self.loads = 0
        server_args = ServerArgs(
            model_path="dummy",
            page_size=1,
            enable_hierarchical_cache=True,
            hicache_write_policy=write,
            hicache_io_backend="direct",
            hicache_mem_layout="page_first_direct",
            hicache_ratio=ratio,
        )
        server_args._mamba_cache_chunk_size = 64
        set_global_server_args_for_scheduler(server_args)
        self.cache.init_hicache(server_args, self.params)
        self.host_states = self.cache.host_pool_group.get_pool(PoolName.MAMBA)
        self.host_kv = self.cache.host_pool_group.get_pool(PoolName.KV)

    def start(self, tokens, **namespace):
        """What can be reused, loaded back from the host where it must be, and a lock on it."""
        match = self.match(tokens, **namespace)
        hit, node = match.device_prefix_len, match.last_device_node
        device = self.lock(node)
        if match.host_hit_length or match.mamba_host_hit_length:
            loaded, node = self.load_back(match)
            hit += loaded
        reused = self.lock(node)
        self.unlock(device)
        return hit, reused

    def load_back(self, match) -> tuple[int, int]:
        """How many tokens came back, and the node that now ends the reusable prefix."""
        req = request([0])
        req.last_node = match.last_device_node
        req.mamba_host_hit_length = match.mamba_host_hit_length
        best = match.best_match_node
        host_lock = self.cache.inc_host_lock_ref(best).to_dec_params()
        loaded = self.cache.init_load_back(
            InitLoadBackParams(best_match_node=best, host_hit_length=match.host_hit_length, req=req)
        )
        self.cache.dec_host_lock_ref(best, host_lock)
        if loaded is None:  # not now: goes on without, where a scheduler would wait
            loaded = 0, req.last_node
        self.loads += loaded[0] > 0
        self.cache.ready_to_load_host_cache()
        if req.kv.holds_mamba:
            self.own_copy(req, loaded[0])
            self.state_pool.free(req.kv.mamba_pool_idx.unsqueeze(0))
        return loaded

    def own_copy(self, req, loaded: int) -> None:
        """The request itself has a copy of the state that was loaded. A subclass may watch."""

    def hit(self, tokens, **namespace) -> tuple[int, int, int]:
        match = self.match(tokens, **namespace)
        return match.device_prefix_len, match.host_hit_length, match.mamba_host_hit_length

    def events(self) -> None:
        """What the scheduler does at each step: submit copies, take note of those made."""
        self.cache.check_hicache_events()

    def evict_host(self, states: int = 0, kv_tokens: int = 0) -> int:
        if states:
            return self.cache.evict_host(states, MAMBA)
        return self.cache.evict_host(kv_tokens)

    def sane(self) -> None:
        """SGLang's own invariants.

        SGLang 0.5.23 checks idle caches only: what a write-through cache is loading back is not
        among the duplicates it keeps a list of (`_is_settled_full_host_duplicate`).
        """
        if self.cache.is_write_back or not self.cache.ongoing_load_back:
            super().sane()

    def sizes(self) -> tuple[int, ...]:
        """Free slots of every pool, and the states that can be evicted."""
        return (
            self.state_pool.available_size(),
            self.allocator.available_size(),
            self.host_states.available_size(),
            self.host_kv.available_size(),
            self.core.mamba_evictable_size(),
        )
