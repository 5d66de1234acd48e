"""The arguments of a server, and of `Engine` in Python."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from statecache_sglang import engine_paths as at
from statecache_sglang.seams import load

__all__ = [
    "hook_engine_arguments",
    "hook_server_args",
    "is_resolved",
    "request_int8_pool",
    "set_chunk_size",
]


def hook_server_args(
    add_cli_args: Callable[..., None],
    from_cli_args: Callable[..., object],
    before_resolution: Callable[..., None],
) -> None:
    """Have the flags added to SGLang's parser and read from it, and every configuration seen.

    The rows `HOOKS` of `patches` say why. A record of `ServerArgs` takes no foreign fields, and its
    constructor cannot be wrapped.
    """
    registry = load("sglang.srt.plugins.hook_registry")
    register, kinds = registry.HookRegistry.register, registry.HookType
    owner = "sglang.srt.server_args.ServerArgs"
    register(f"{owner}.add_cli_args", add_cli_args, kinds.AFTER)
    register(f"{owner}.from_cli_args", from_cli_args, kinds.AROUND)
    register(f"{owner}.resolve_once", before_resolution, kinds.BEFORE)


def hook_engine_arguments(around: Callable[..., object]) -> None:
    """Have `Engine(...)` take the plugin's arguments, where `Engine` is loaded.

    `Engine.__init__` of SGLang 0.5.23 loads the plugins, then builds `server_args_class(**kwargs)`.
    """
    module: Any = sys.modules.get(at.ENGINE)
    if module is None or hasattr(module.Engine, "_statecache"):
        return
    module.Engine._statecache = True  # noqa: SLF001
    original = module.Engine.server_args_class

    @functools.wraps(original, updated=())
    def server_args_class(**kwargs: object) -> object:
        return around(original, **kwargs)

    module.Engine.server_args_class = staticmethod(server_args_class)


def is_resolved(server_args: object) -> bool:
    """Whether `ServerArgs.resolve_once` ran already: the record can no longer be changed."""
    return bool(getattr(server_args, "_resolution_finished", False))


def request_int8_pool(server_args: Any, slots: int | None) -> None:
    """Have SGLang treat this server as one with an int8 pool, its own refusals included."""
    server_args.enable_int8_mamba_checkpoint = True
    server_args.int8_mamba_ckpt_size = slots


def set_chunk_size(server_args: Any, tokens: int) -> None:
    """Say what a model's configuration would: how many tokens a chunk of its kernels has."""
    server_args._mamba_cache_chunk_size = tokens  # noqa: SLF001 - it has no setter
