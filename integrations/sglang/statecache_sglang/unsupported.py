"""Ways to run SGLang that this release does not support together with the plugin."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from statecache.errors import SettingsError, exit_engine
from statecache.trace.record_file import check_record_file
from statecache_sglang.scheduler_side import scheduler_side_of

if TYPE_CHECKING:
    from statecache.engine.settings import Settings
    from statecache_sglang.views import CacheParameters, ServerArguments, TreeCache


def _above_one(size: object) -> bool:
    return isinstance(size, int) and size > 1


# By the field of `ServerArgs` (SGLang 0.5.23): what is refused, and how the line calls it.
REFUSED: dict[str, tuple[Callable[[object], bool], str]] = {
    "disable_radix_cache": (bool, "--disable-radix-cache (nothing would be cached)"),
    "radix_cache_backend": (bool, "--radix-cache-backend"),
    "hicache_storage_backend": (bool, "--hicache-storage-backend"),
    "hicache_host_memory_mode": (
        lambda mode: mode == "buffer_only",
        "--hicache-host-memory-mode buffer_only",
    ),
    "enable_lmcache": (bool, "--enable-lmcache"),
    "enable_flexkv": (bool, "--enable-flexkv"),
    "enable_unified_cache_external_linker": (bool, "--enable-unified-cache-external-linker"),
    "enable_session_radix_cache": (bool, "--enable-session-radix-cache"),
    "enable_streaming_session": (bool, "--enable-streaming-session"),
    "enable_unified_memory": (bool, "--enable-unified-memory"),
    "pp_size": (_above_one, "pipeline parallelism (--pp-size above 1)"),
    "dp_size": (_above_one, "data parallelism (--dp-size above 1)"),
    "disaggregation_mode": (
        lambda mode: mode != "null",
        "prefill/decode disaggregation (--disaggregation-mode)",
    ),
    "enable_linear_replayssm_spec": (
        bool,
        "--enable-linear-replayssm-spec (not tried: a verify step keeps no state of each draft)",
    ),
}

# The same with an int8 pool.
REFUSED_WITH_INT8: dict[str, str] = {
    "enable_multi_layer_eagle": (
        "--enable-multi-layer-eagle (draft heads copy a cached state by its slot among the running)"
    ),
}
_WITH_INT8 = "is not supported with --statecache-checkpoints int8"


def refuse_draft_states() -> None:
    """Stop with one line where a draft head is about to get a pool of states of its own."""
    exit_engine(f"{REFUSED_WITH_INT8['enable_multi_layer_eagle']} {_WITH_INT8}")


def refuse_host_copies(settings: Settings) -> None:
    """Stop with one line if states are to be copied to the host out of the int8 pool."""
    if settings.in_force.checkpoints is not None:
        exit_engine(f"--enable-hierarchical-cache {_WITH_INT8}")


def refuse_storage(
    original: Callable[..., tuple[bool, str]], cache: TreeCache, *args: object, **kwargs: object
) -> tuple[bool, str]:
    """Around `UnifiedRadixCache.attach_storage_backend`, by which a running server gets one.

    The request is answered with the reason, and the server goes on as it is.
    """
    if scheduler_side_of(cache) is None:
        return original(cache, *args, **kwargs)
    return False, "statecache: a storage backend is not supported with --kv-cache-plugin statecache"


def refuse_cache(params: CacheParameters, components: Collection[str], core: str) -> None:
    """Stop with one line where the index cannot manage a cache of these components and tree core.

    Both are named as SGLang names them.
    """
    problem = None
    if core not in ("rust", "python"):
        problem = f"the tree core '{core}'"
    elif set(components) != {"FULL", "MAMBA"}:
        problem = f"a cache of {', '.join(components)}"
    elif params.enable_session_radix_cache:
        problem = "--enable-session-radix-cache"
    elif params.component_registry_override:
        problem = "a cache with components of its own (MLX)"
    if problem is not None:
        exit_engine(f"{problem} is not supported with --kv-cache-plugin statecache")


def refuse(server_args: ServerArguments, settings: Settings) -> None:
    """Stop with one line if `server_args` asks for something that is not supported."""
    if settings.record is not None and multiprocessing.parent_process() is None:
        # In a child the file may be that of this very server.
        try:
            check_record_file(settings.record)
        except SettingsError as error:
            exit_engine(error)
    if server_args.enable_hierarchical_cache:
        refuse_host_copies(settings)
    if settings.in_force.checkpoints is not None:
        for field, name in REFUSED_WITH_INT8.items():
            if getattr(server_args, field):
                exit_engine(f"{name} {_WITH_INT8}")
    for field, (is_refused, name) in REFUSED.items():
        if is_refused(getattr(server_args, field)):
            exit_engine(f"{name} is not supported with --kv-cache-plugin statecache")
