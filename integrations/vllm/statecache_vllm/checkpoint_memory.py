"""How large the checkpoint pool is, and what a state looks like.

The scheduler and every worker come to the same number of slots from the same `KVCacheConfig`, so
nothing has to be sent. Memory is set aside before vLLM divides the rest into blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from importlib import import_module
from typing import Any

import msgspec

from statecache.engine.settings import Settings, flag_of, memory_in
from statecache.errors import SettingsError, exit_engine
from statecache.sizing.model_config import DTYPE_BYTES, model_of
from statecache_vllm import seams
from statecache_vllm.views import KVCacheConfig, KVCacheSpec, MambaSpec, Tensor, VllmConfig

__all__ = [
    "bytes_per_state",
    "check_slots",
    "describe",
    "dry_run_sizes",
    "is_exact",
    "knows_states",
    "pool_slots",
    "set_aside",
]

_log = logging.getLogger("statecache.vllm")

# Torch is the engine's, and not there where this package is only checked.
torch: Any = import_module("torch")
# Of the memory for blocks and checkpoints together, one part in so many is for checkpoints, and of
# the host memory that is free.
_SHARE = 10
# States on the device on their way to host memory or from there.
RING_STATES = 4


def describe(tensors: Iterable[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Tell the temporal state of a layer, `[blocks, heads, d_v, d_k]`, from its other tensors."""
    every = list(tensors)
    temporal = [tensor for tensor in every if tensor.dim() == 4]
    if len(temporal) != 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in every)
        exit_engine(f"a checkpoint pool does not know states of shapes {shapes}")
    return temporal[0], [tensor for tensor in every if tensor.dim() != 4]


def is_exact(settings: Settings) -> bool:
    """Whether a stored state is kept bit for bit, and none is refused; also without a pool."""
    library = import_module("statecache.checkpoint.formats")
    return bool(library.format_named(settings.checkpoints or "native").exact)


def knows_states(kv_cache_config: KVCacheConfig) -> bool:
    """Whether `describe` knows the states of this model."""
    specs = [g.kv_cache_spec for g in kv_cache_config.kv_cache_groups]
    return all(
        sum(len(shape) == 3 for shape in spec.shapes) == 1 for spec in specs if seams.is_mamba(spec)
    )


def with_host_size(settings: Settings, ranks: int) -> Settings:
    """Return settings that say how much host memory each rank gets, if checkpoints are kept there.

    Once for all processes of a server: what is free is another number in each. `SettingsError` if
    not so much is free for all of them.
    """
    if not settings.on_host or settings.checkpoint_slots is not None:
        return settings
    _, asked = memory_in(settings.checkpoint_memory)
    free = _free_on_host()
    size = asked if asked is not None or free is None else free // _SHARE
    if size is None:
        raise SettingsError(
            f"{flag_of('checkpoint_memory')} host: how much memory is free is not known here: give"
            " host:SIZE"
        )
    if free is not None and size > free:
        raise SettingsError(
            f"{flag_of('checkpoint_memory')} {settings.checkpoint_memory}: {free:,} bytes of host"
            " memory are free: give less"
        )
    if asked is None:
        _log.info(
            "statecache: %s bytes of host memory for the checkpoints of %d ranks, a tenth of what"
            " is free",
            f"{size:,}",
            ranks,
        )
    return msgspec.structs.replace(settings, checkpoint_memory=f"host:{size // ranks}")


def _free_on_host() -> int | None:
    library = import_module("statecache.checkpoint.memory")
    free: int | None = library.free_bytes_on(torch.device("cpu"))
    return free


def _state_bytes(specs: Iterable[tuple[MambaSpec, int]], mode: str, memory: str = "device") -> int:
    """Return the bytes of one state; `specs` are `MambaSpec`s and how many layers have each."""
    library = import_module("statecache.checkpoint.pool")
    total = 0
    for spec, layers in specs:
        tensors = [
            torch.empty((1, *shape), dtype=dtype, device="meta")
            for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
        ]
        temporal, conv = describe(tensors)
        active = library.ActiveState([temporal] * layers, conv * layers)
        total += int(library.estimate_bytes(active, 1, mode=mode, memory=memory))
    return total


def bytes_per_state(mode: str, kv_cache_config: KVCacheConfig, memory: str = "device") -> int:
    """Return the bytes of one state at rest, on one rank."""
    specs = [(g.kv_cache_spec, len(g.layer_names)) for g in kv_cache_config.kv_cache_groups]
    states = [(spec, layers) for spec, layers in specs if seams.is_mamba(spec)]
    return _state_bytes(states, mode, memory)


def check_slots(settings: Settings, vllm_config: VllmConfig) -> None:
    """Raise `SettingsError` if the slots asked for need more memory than a device has at all.

    Before an engine is started, from the file of a model that is known; `set_aside` sees any.
    """
    asked, ranks = settings.checkpoint_slots, vllm_config.parallel_config.tensor_parallel_size
    if asked is None:
        return
    try:
        model = model_of(vllm_config.model_config.hf_text_config.to_dict(), "config.json", ranks)
    except SettingsError:
        return
    total, where = seams.device_memory(), "a device here has"
    if settings.on_host:
        total, where = (_free_on_host() or total) // ranks, "each rank's share of host memory is"
    dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    state = vllm_config.cache_config.mamba_ssm_cache_dtype
    model = msgspec.structs.replace(model, dtype=dtype if dtype in DTYPE_BYTES else model.dtype)
    model = model.widened(vllm_config.num_speculative_tokens)
    kept = settings.checkpoints or "native"
    state_bytes = model.bytes_at_rest(kept, "vllm", state if state in DTYPE_BYTES else None)
    if asked * state_bytes > total:
        raise SettingsError(
            f"{_need(settings, asked, state_bytes)}, and {where} {total:,}: give fewer"
        )


def _need(settings: Settings, slots: int, state_bytes: int) -> str:
    what = f"{slots} {settings.checkpoints} checkpoints of {state_bytes:,} bytes"
    return f"{flag_of('checkpoint_slots')}: {what} need {slots * state_bytes:,} bytes"


def pool_slots(settings: Settings, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Return how many states the checkpoint pool holds."""
    mode = settings.checkpoints
    if mode is None:
        return 0
    groups = kv_cache_config.kv_cache_groups
    place, size = memory_in(settings.checkpoint_memory)
    state_bytes = bytes_per_state(mode, kv_cache_config, place)
    block = max(g.kv_cache_spec.page_size_bytes * len(g.layer_names) for g in groups)
    blocks = int(kv_cache_config.num_blocks)
    asked = settings.checkpoint_slots
    if size is not None:
        room = size
        what = f"the {room:,} bytes of host memory of a rank: give {flag_of('checkpoint_memory')}"
        advice = f"{what} host:SIZE"
    else:
        room = blocks * block // (_SHARE - 1)
        what = f"a tenth of the {blocks * block:,} bytes of blocks"
        advice = f"{what}: give {flag_of('checkpoint_slots')} N"
    slots = asked if asked is not None else room // state_bytes
    if slots < 1:
        exit_engine(f"one {mode} checkpoint of {state_bytes:,} bytes does not fit in {advice}")
    by_hand = vllm_config.cache_config.num_gpu_blocks_override is not None
    _log.info(
        "statecache: %d %s checkpoints of %d bytes in %s memory, each %d slots of the pool,"
        " %d bytes in all%s",
        slots,
        mode,
        state_bytes,
        place,
        sum(seams.is_mamba(group.kv_cache_spec) for group in groups),
        slots * state_bytes,
        ", on top of the number of blocks given by hand" if by_hand and place == "device" else "",
    )
    return slots


def dry_run_sizes(settings: Settings, kv_cache_config: KVCacheConfig) -> tuple[int, int]:
    """Return the slots of the pool these settings ask for, and the tokens of KV beside it.

    Without a pool in the settings, exact copies in a tenth of the memory.
    """
    groups = kv_cache_config.kv_cache_groups
    place, size = memory_in(settings.checkpoint_memory)
    state_bytes = bytes_per_state(settings.checkpoints or "native", kv_cache_config, place)
    block = max(g.kv_cache_spec.page_size_bytes * len(g.layer_names) for g in groups)
    total = int(kv_cache_config.num_blocks) * block
    room = total // _SHARE if size is None else size
    slots = settings.checkpoint_slots or max(room // state_bytes, 1)
    kv = [g.kv_cache_spec.block_size for g in groups if not seams.is_mamba(g.kv_cache_spec)]
    taken = slots * state_bytes if place == "device" else 0
    blocks = max(total - taken, block) // block
    return slots, blocks * min(kv) // len(kv)


def set_aside(settings: Settings, specs: Iterable[KVCacheSpec], available: int) -> int:
    """Return what is left of `available` bytes for blocks."""
    mode = settings.checkpoints
    if mode is None:
        return available
    place, asked = memory_in(settings.checkpoint_memory)[0], settings.checkpoint_slots
    if place == "device" and asked is None:
        return available - available // _SHARE
    state_bytes = _state_bytes([(spec, 1) for spec in specs if seams.is_mamba(spec)], mode, place)
    if place == "host":
        need = RING_STATES * state_bytes
        what = f"{flag_of('checkpoint_memory')} host: {need:,} bytes are needed on the device"
        advice = "raise --gpu-memory-utilization"
    else:
        need = (asked or 0) * state_bytes
        what, advice = _need(settings, asked or 0, state_bytes), "give fewer"
    if need >= available:
        exit_engine(f"{what}, {available:,} are there for blocks and checkpoints: {advice}")
    return available - need
