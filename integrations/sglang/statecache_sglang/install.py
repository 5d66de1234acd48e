"""Puts the adapter in place, all of it or nothing, and says so."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from statecache.engine import seams as seam
from statecache.engine.patching import Patch, PatchSet
from statecache.engine.settings import Settings
from statecache_sglang import patches, seam_table, seams
from statecache_sglang.engine_classes import MambaComponent
from statecache_sglang.recording import Recording
from statecache_sglang.seams import tree
from statecache_sglang.views import (
    CacheParameters,
    ComponentType,
)

_log = logging.getLogger("statecache.sglang")


class Installed:
    """What was put in place, for `remove` to take back."""

    def __init__(self, settings: Settings, patch_set: PatchSet) -> None:
        self.settings = settings
        self._patch_set = patch_set

    def remove(self) -> None:
        """Give SGLang its own parts back; caches already built keep what they have."""
        self._patch_set.remove()


def install(settings: Settings) -> Installed:
    """Probe every seam, then install. Raises `SeamError` with nothing installed.

    A dry run installs what sees requests come and go, and nothing else.
    """
    without = check_seams(settings)
    leads_rust = seam_table.RUST_LEAD not in without
    rows = [] if settings.dry_run else _state_patches(settings, leads_rust=leads_rust)
    if settings.checkpoints is not None and not settings.dry_run:
        rows += _int8_patches(settings)
    if settings.record is not None or settings.dry_run:
        rows += _recording_patches(settings)
    version = seams.engine_version()
    off = {each.target for each in seam_table.OPTIONAL if each.optional in without}
    patch_set = PatchSet([row for row in rows if row.target not in off])
    patch_set.install()
    cost = settings.cost_model()
    _log.info(
        "statecache: policy %s, cost %r,%r, SGLang %s",
        "none (dry run)" if settings.dry_run else settings.policy,
        cost.linear,
        cost.quadratic,
        version,
    )
    return Installed(settings, patch_set)


def _state_patches(settings: Settings, *, leads_rust: bool) -> list[Patch]:
    from statecache_sglang.invariants import check_state_pools
    from statecache_sglang.prefill_chunks import continue_chunks
    from statecache_sglang.slot_shortage import admit_all_or_none, load_back_or_wait
    from statecache_sglang.speculation import note_uncached, note_verified
    from statecache_sglang.steps import begin_step
    from statecache_sglang.unsupported import refuse_storage

    cores = _TreeCores(settings, leads_rust=leads_rust)
    return [
        patches.TREE_CORE.carried_out_by(cores.register, tree.unregister_tree_core),
        patches.SELECT_TREE_CORE.wrapped_by(cores.select),
        patches.MAMBA_COMPONENT.carried_out_by(cores.put_component, cores.take_back_component),
        patches.ADD_ONE_REQ.wrapped_by(admit_all_or_none),
        patches.ADD_CHUNKED_REQ.wrapped_by(continue_chunks),
        patches.QUEUE_SORTED.wrapped_by(begin_step),
        patches.INIT_LOAD_BACK.wrapped_by(load_back_or_wait),
        patches.VERIFIED.wrapped_by(note_verified),
        patches.NOT_CACHED.wrapped_by(note_uncached),
        patches.CHECK_STATE_POOL.wrapped_by(check_state_pools),
        patches.ATTACH_STORAGE.wrapped_by(refuse_storage),
    ]


def _int8_patches(settings: Settings) -> list[Patch]:
    from statecache_sglang.checkpoints import CheckpointMemory, evict_no_checkpoints, no_own_pool

    memory = CheckpointMemory(settings.checkpoint_slots, settings.verify)
    return [
        patches.OWN_INT8_POOL.wrapped_by(no_own_pool),
        patches.INIT_STATE_POOL.wrapped_by(memory.build_beside),
        patches.EVICT_FOR_ALLOC.wrapped_by(evict_no_checkpoints),
        patches.STATE_BUDGET.wrapped_by(memory.take_off_budget),
    ]


def _recording_patches(settings: Settings) -> list[Patch]:
    recording = Recording(settings)
    return [
        patches.SCHEDULER_INIT.wrapped_by(recording.begin_with_scheduler),
        patches.QUEUE_REQUEST.wrapped_by(recording.note_arrival),
        patches.ABORT_REQUEST.wrapped_by(recording.note_abort),
        patches.STREAM_OUTPUT.wrapped_by(recording.note_ends),
    ]


def check_seams(settings: Settings) -> Mapping[str, str]:
    """Raise `SeamError` unless every seam is as it was in the tested versions.

    Returns the features that are off in this one, with the reasons.
    """
    version = seams.engine_version()
    used = seam_table.SEAMS
    if settings.record is not None or settings.dry_run:
        used += seam_table.RECORDING_SEAMS
    return seam.check(
        "SGLang",
        version,
        used,
        seam_table.TESTED,
        package="sglang",
        strict=settings.strict,
        log=_log,
        views=seam_table.VIEWS,
    )


class _TreeCores:
    """Says which caches are managed, and builds their tree cores."""

    def __init__(self, settings: Settings, *, leads_rust: bool) -> None:
        from statecache_sglang.tree_python import IndexedMambaComponent, IndexedPythonCore

        self._settings = settings
        self._component = IndexedMambaComponent
        self._python_core = IndexedPythonCore
        self._leads_rust = leads_rust
        self._original_select: tree.Select
        self._original_component: type[MambaComponent]

    def register(self) -> None:
        """Add the plugin's tree core to SGLang's."""
        tree.register_tree_core(self.build)

    def select(self, original: tree.Select, params: CacheParameters) -> str:
        """Around `select_tree_core_backend`: the plugin's tree core for a cache it manages."""
        self._original_select = original
        name = tree.resolve_tree_core(original, params)
        return tree.choose_tree_core(name, managed=should_manage(params, name))

    def build(
        self, params: CacheParameters, components: Mapping[ComponentType, MambaComponent]
    ) -> object:
        """Make the tree core of a cache, in the place of the one SGLang chose."""
        chosen = tree.resolve_tree_core(self._original_select, params)
        if chosen == "rust" and self._leads_rust:
            from statecache_sglang.tree_rust import IndexedRustCore

            return IndexedRustCore(params, self._settings)
        return self._python_core(params, components, self._settings)

    def put_component(self) -> None:
        """Have caches built with the plugin's component."""
        self._original_component = tree.set_mamba_component(self._component)

    def take_back_component(self) -> None:
        """Have them built with SGLang's again."""
        tree.set_mamba_component(self._original_component)


def should_manage(params: CacheParameters, name: str) -> bool:
    """Whether the index manages the cache that is about to be built; stop where it cannot.

    `name` is the tree core that SGLang chose.
    """
    from statecache_sglang.unsupported import refuse_cache

    components = tree.tree_components(params)
    if params.disable or "MAMBA" not in components:
        _log.warning("statecache: this model caches no recurrent states; nothing was changed")
        return False
    refuse_cache(params, components, name)
    return True
