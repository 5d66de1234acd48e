"""What host copies of states need of SGLang (HiCache)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from statecache_sglang import engine_paths as at
from statecache_sglang.seams import AroundPatch, Patch, full_type, load, mamba_type

__all__ = [
    "backup_request",
    "load_back_patch",
    "match_ending_at",
    "storage_patch",
    "wants_backup",
]


def wants_backup(core: Any, node_id: int) -> bool:
    """Whether the Python core would copy this inner state to the host before it drops it.

    As `MambaComponent._evict_device_next_node` of SGLang 0.5.23: only with write-back.
    """
    if not (core.enable_hicache and core.is_write_back):
        return False
    node = core.node_by_id(node_id)
    host_copy = node.component_data[mamba_type()].host_value
    kv = node.component_data[full_type()].value
    return host_copy is None and not node.backuped and kv is not None


def backup_request(node_id: int) -> Any:
    """Return what the Python core's walk says to have an inner state copied to the host first."""
    return load(at.COMPONENTS).InternalStateBackup(node_id=node_id, num_tokens=1)


def match_ending_at(core: Any, node_id: int, req: Any) -> tuple[Any, Any]:
    """Return the parameters and the result of a match that gives `req` the state of a node.

    What `MambaComponent.finalize_match_result_in_cache` of SGLang 0.5.23 reads of them.
    """
    params = load("sglang.srt.mem_cache.base_prefix_cache").MatchPrefixParams
    match = core.empty_match_result._replace(best_match_node=node_id)
    return params(key=None, cow_mamba=True, req=req), match


def load_back_patch(around: Callable[..., Any]) -> Patch:
    """Return a patch that puts `around` around `UnifiedRadixCache.init_load_back`."""
    return AroundPatch(load(at.CACHE).UnifiedRadixCache, "init_load_back", around)


def storage_patch(around: Callable[..., Any]) -> Patch:
    """Return a patch that puts `around` around `UnifiedRadixCache.attach_storage_backend`."""
    return AroundPatch(load(at.CACHE).UnifiedRadixCache, "attach_storage_backend", around)
