"""What vLLM calls when it loads its plugins: the flags, and the switch they turn.

vLLM 0.32 loads general plugins before it parses the command line (`AsyncEngineArgs.add_cli_args`),
when an engine is configured, and again in every process it starts (`EngineCore`, workers). The
settings travel to those processes inside `VllmConfig`: in the connector's configuration, without a
checkpoint pool in `additional_config`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from statecache_vllm import seams

if TYPE_CHECKING:
    import argparse

    from statecache_vllm.views import EngineArgs, VllmConfig

# As statecache.engine.settings.CONFIG_VARIABLE, which must not be imported while the plugin is off.
_CONFIG = "STATECACHE_CONFIG"


def register() -> None:
    """Entry point of vLLM's plugin loader: adds the flags, and looks at every configuration."""
    seams.hook_engine_args(_add_flags, _flags_given, _configure)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    from statecache.engine.settings import add_flags
    from statecache_vllm.spec import SPEC

    add_flags(parser, SPEC)


def _flags_given(args: argparse.Namespace) -> dict[str, object]:
    from statecache.engine.settings import given_on

    return given_on(args)


def _configure(
    original: Callable[[], VllmConfig], engine_args: EngineArgs, flags: dict[str, object]
) -> VllmConfig:
    """Around `EngineArgs.create_engine_config`: install if the settings say so."""
    given = _of_additional_config(engine_args.additional_config) | flags
    if not given and not os.environ.get(_CONFIG):
        return original()
    from statecache.engine.settings import Settings
    from statecache.errors import SeamError, SettingsError, exit_engine

    try:
        settings = Settings.from_given(given)
        if not settings.enabled:
            return original()
        from statecache_vllm.spec import SPEC

        settings.require_engine(SPEC)
        from statecache_vllm.install import configure

        return configure(settings, engine_args, original)
    except (SettingsError, SeamError, ImportError) as error:
        exit_engine(error)


def _of_additional_config(config: object) -> dict[str, object]:
    """Return what `additional_config={"kv_cache_plugin": ..., "statecache_...": ...}` gives."""
    if not isinstance(config, dict):
        return {}
    return {
        name.removeprefix("statecache_"): value
        for name, value in config.items()
        if name == "kv_cache_plugin" or name.startswith("statecache_")
    }
