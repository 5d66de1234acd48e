"""What the rest of the plugin knows of an engine: one `EngineSpec` for each adapter.

An adapter names its own in the entry-point group `statecache.engines`; nothing else of the plugin
names an engine. To import a spec must not import the engine.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from statecache.errors import SettingsError, escape_control_chars

if TYPE_CHECKING:
    from statecache.engine.patching import Patch
    from statecache.engine.seams import Seam
    from statecache.engine.views import View

__all__ = ["GROUP", "EngineCounters", "EngineSpec", "engine_named", "engines", "load"]

GROUP = "statecache.engines"


@dataclasses.dataclass(frozen=True)
class EngineCounters:
    """The engine's own counters in its `/metrics`, as far as it has them.

    `prefix` begins the name of each of its metrics. `kv_pool_gib` is a gauge: the size of the pool
    of KV alone. With `ranks_repeat` each tensor-parallel rank counts the same things.
    """

    prefix: str
    requests: str | None = None
    prompt_tokens: str | None = None
    hit_tokens: str | None = None
    kv_pool_gib: str | None = None
    ranks_repeat: bool = False


@dataclasses.dataclass(frozen=True)
class EngineSpec:
    """An engine and the adapter for it. Places are written "module:attribute" and loaded at use.

    `name` is that of the engine's package, `title` what people call it. `plugin_group` is the
    entry-point group it loads plugins from, `disable_variable` the environment variable that lists
    those it may load. `version()` is what is installed, without importing it.

    `patches` are the changes of the engine, `hooks` those that are made by what it has for plugins,
    as soon as it loads this one.

    `own_settings` are those of the settings for some engines alone that this one takes; `refused`
    has settings and values it cannot do, with the end of the sentence that says why. `extensions`
    are the native modules of the plugin it needs beside the index, with what they are for.

    `slots_per_request` is how many state slots a running request holds; `sizing` the class that
    divides the memory of a GPU (`statecache.sizing.splits.EngineSplits`); `cache_driver` the module
    that plays its cache layer for `statecache ab`, `arms` what that plays: policies by pool, each
    pool's own default first after "stock". `arm_admissions` are where it can set states,
    `arm_keys` the keys of arms for some engines alone that this one takes, `state_blocks` how many
    blocks a state takes in a pool that it shares with KV, if that is fixed, and `arms_note` what a
    reader of a comparison with another engine must know, in sentences. `tuned` are the keys of its
    arms without the plugin whose own settings are those of users who tune it, by what to call them.
    """

    name: str
    title: str
    plugin_group: str
    tested_versions: tuple[str, ...]
    seams: Sequence[Seam]
    version: Callable[[], str]
    disable_variable: str | None = None
    patches: Sequence[Patch] = ()
    hooks: Sequence[Patch] = ()
    views: Sequence[View] = ()
    own_settings: tuple[str, ...] = ()
    refused: Mapping[tuple[str, str], str] = dataclasses.field(default_factory=dict)
    extensions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    counters: EngineCounters | None = None
    metrics_flag: str | None = None
    slots_per_request: int = 1
    sizing: str | None = None
    cache_driver: str | None = None
    arms: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    arm_admissions: tuple[str, ...] = ("dense",)
    arm_keys: tuple[str, ...] = ()
    tuned: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    state_blocks: int | None = None
    arms_note: str = ""


@functools.cache
def engines() -> dict[str, EngineSpec]:
    """Return the spec of every engine that an installed adapter is for, by name, in its order.

    Raises `SettingsError` for an adapter that cannot be loaded.
    """
    found = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            spec: EngineSpec = entry.load()
        except (ImportError, AttributeError) as error:
            raise SettingsError(
                escape_control_chars(
                    f"the adapter for {entry.name} ({entry.value}) cannot be loaded: {error}:"
                    " reinstall or uninstall its package"
                )
            ) from error
        found[spec.name] = spec
    return found


def engine_named(name: str, flag: str = "--engine") -> EngineSpec:
    """Return the spec of the engine `name`. Raises `SettingsError` with those there are."""
    known = engines()
    if name not in known:
        raise SettingsError(f"{flag}: unknown engine {name!r}: use {', '.join(known)}")
    return known[name]


def load(place: str) -> Any:
    """Return what is at "module:attribute"."""
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)
