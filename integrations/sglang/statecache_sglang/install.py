"""Puts the adapter in place, all of it or nothing, and says so."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from statecache.engine import seams as seam
from statecache.engine.settings import Settings
from statecache.errors import exit_engine
from statecache_sglang import host_seams, record_seams, recording, seam_table, seams

_log = logging.getLogger("statecache.sglang")


class Installed:
    """What was put in place, for `remove` to take back."""

    def __init__(self, settings: Settings, patches: Sequence[seams.Patch]) -> None:
        self.settings = settings
        self._patches = patches

    def remove(self) -> None:
        """Give SGLang its own parts back; caches already built keep what they have."""
        for patch in self._patches:
            patch.remove()


def install(settings: Settings) -> Installed:
    """Probe every seam, then install. Raises `SeamError` with nothing installed.

    A dry run installs what sees requests come and go, and nothing else.
    """
    check_seams(settings)
    patches = recording.patches(settings) if settings.dry_run else _everything(settings)
    with ExitStack() as undo:
        for patch in patches:
            patch.install()
            undo.callback(patch.remove)
        undo.pop_all()
    _log.info(
        "statecache: policy %s, cost %r,%r, SGLang %s",
        "none (dry run)" if settings.dry_run else settings.policy,
        *settings.cost,
        seams.engine_version(),
    )
    return Installed(settings, patches)


def _everything(settings: Settings) -> Sequence[seams.Patch]:
    from statecache_sglang.invariants import check_state_pools
    from statecache_sglang.pool_seams import CheckerPatch
    from statecache_sglang.slot_shortage import admit_all_or_none, load_back_or_wait
    from statecache_sglang.tree_python import IndexedMambaComponent, IndexedPythonCore
    from statecache_sglang.tree_rust import IndexedRustCore
    from statecache_sglang.unsupported import refuse_storage

    def build(params: Any, components: Any, name: str) -> Any:
        if name == "rust":
            return IndexedRustCore(params, settings)
        return IndexedPythonCore(params, components, settings)

    patches: list[seams.Patch] = [
        seams.TreeCorePatch(IndexedMambaComponent, leads, build),
        seams.admission_patch(admit_all_or_none),
        host_seams.load_back_patch(load_back_or_wait),
        CheckerPatch(check_state_pools),
        host_seams.storage_patch(refuse_storage),
    ]
    if settings.checkpoints is not None:
        from statecache_sglang import checkpoints as int8

        patches += int8.patches(settings)
    return [*patches, *recording.patches(settings)]


def check_seams(settings: Settings) -> None:
    """Raise `SeamError` unless every seam is as it was in the tested versions."""
    version = seams.engine_version()
    used = seam_table.SEAMS
    if settings.record is not None or settings.dry_run:
        used += record_seams.SEAMS
    seam.check("SGLang", version, used, seam_table.TESTED, strict=settings.strict, log=_log)


def leads(params: Any, name: str) -> bool:
    """Whether the index leads the cache that is about to be built; stop where it cannot."""
    components = seams.tree_components(params)
    if params.disable or "MAMBA" not in components:
        _log.warning("statecache: this model caches no recurrent states; nothing was changed")
        return False
    problem = None
    if name not in ("rust", "python"):
        problem = f"the tree core '{name}'"
    elif set(components) != {"FULL", "MAMBA"}:
        problem = f"a cache of {', '.join(components)}"
    elif params.enable_session_radix_cache:
        problem = "--enable-session-radix-cache"
    elif params.component_registry_override:
        problem = "a cache with components of its own (MLX)"
    if problem is not None:
        exit_engine(f"{problem} is not supported with --kv-cache-plugin statecache")
    return True
