"""What SGLang calls when it loads its plugins: the flags, and the switch they turn.

SGLang 0.5.23 loads plugins before it parses the command line (`launch_server`, `cli/serve.py`),
in `Engine.__init__`, and again in every process it starts (`run_scheduler_process`,
`run_detokenizer_process`). Settings travel to those processes in `STATECACHE_CONFIG`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from statecache_sglang.seams import server_args as arguments

if TYPE_CHECKING:
    import argparse

    from statecache.engine.settings import Settings
    from statecache_sglang.install import Installed
    from statecache_sglang.views import (
        ServerArguments,
    )

# As statecache.engine.settings.CONFIG_VARIABLE, which must not be imported while the plugin is off.
_CONFIG = "STATECACHE_CONFIG"
_SCHEDULER = "sglang.srt.managers.scheduler"

_hooked = False  # SGLang would add the flags twice
_installed: Installed | None = None
# What was last written to the variable, and what the user had in it before.
_written: tuple[str, str] = ("", "")


def register() -> None:
    """Entry point of SGLang's plugin loader.

    Adds the flags. Where the settings are already in the environment and this process may run a
    scheduler, installs: SGLang only logs what a plugin raises, so a failure ends it.
    """
    global _hooked
    if not _hooked:
        arguments.hook_server_args(_add_cli_args, _from_cli_args, _before_resolution)
        _hooked = True
    arguments.hook_engine_arguments(_engine_arguments)
    if os.environ.get(_CONFIG) and _SCHEDULER in sys.modules:
        switch({})


def switch(given: dict[str, object]) -> Settings:
    """Settle the settings from what was given and the environment; install if they say so.

    Once on, the plugin stays on for every later engine of this process, unless that one gives
    settings of its own. They take the place of those of the earlier one.
    """
    global _installed, _written
    from statecache.engine.settings import Settings
    from statecache.errors import SeamError, SettingsError, exit_engine

    try:
        environment = dict(os.environ)
        before = environment.get(_CONFIG, "")
        if given and before == _written[0]:
            before = environment[_CONFIG] = _written[1]
        settings = Settings.from_given(given, environment)
        if not settings.enabled:
            return settings
        from statecache_sglang.spec import SPEC

        settings.require_engine(SPEC)
        if given:
            settings.to_environment()
            _written = (os.environ[_CONFIG], before)
        if _installed is None or _installed.settings != settings:
            from statecache_sglang.install import install

            if _installed is not None:
                _installed.remove()
                _installed = None
            _installed = install(settings)
    except (SettingsError, SeamError, ImportError) as error:
        exit_engine(error)
    return settings


def _add_cli_args(_result: object, *args: argparse.ArgumentParser) -> None:
    from statecache.engine.settings import add_flags
    from statecache_sglang.spec import SPEC

    add_flags(args[-1], SPEC)


def _from_cli_args(original: Callable[..., object], cls: type, args: argparse.Namespace) -> object:
    from statecache.engine.settings import given_on

    given = given_on(args)
    if given:
        switch(given)
    return original(cls, args)


def _before_resolution(server_args: ServerArguments, *_args: object, **_kwargs: object) -> None:
    if not os.environ.get(_CONFIG) or arguments.is_resolved(server_args):
        return
    settings = switch({})
    if settings.enabled:
        from statecache_sglang.unsupported import refuse

        refuse(server_args, settings)
        if settings.in_force.checkpoints is not None:
            arguments.request_int8_pool(server_args, settings.checkpoint_slots)


def _engine_arguments(original: Callable[..., object], **kwargs: object) -> object:
    given = _take_own(kwargs)
    if given:
        switch(given)
    return original(**kwargs)


def _take_own(kwargs: dict[str, object]) -> dict[str, object]:
    names = [name for name in kwargs if name == "kv_cache_plugin" or name.startswith("statecache_")]
    return {name.removeprefix("statecache_"): kwargs.pop(name) for name in names}
