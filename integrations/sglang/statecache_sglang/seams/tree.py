"""The tree of a cache: SGLang's classes, what is done to a tree, and which tree core is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from statecache.errors import SeamError
from statecache_sglang import engine_paths as at
from statecache_sglang.engine_classes import MambaComponent, PythonTreeCore
from statecache_sglang.seams import load
from statecache_sglang.views import (
    CacheParameters,
    ComponentType,
    Frees,
    InnerStep,
    MatchParameters,
    MatchResult,
    PythonCore,
    Request,
    Tracker,
    TreeCore,
    WalkStep,
)

__all__ = [
    "UnlimitedPathStates",
    "backup_request",
    "choose_tree_core",
    "drop_inner_state",
    "drop_path_requests",
    "full_type",
    "inner_step",
    "is_evictable_device_leaf",
    "leaf_step",
    "mamba_component",
    "mamba_type",
    "match_end_phase",
    "match_ending_at",
    "match_ending_earlier",
    "no_step",
    "path_clearing_bindings",
    "python_tree_core",
    "register_tree_core",
    "resolve_tree_core",
    "rust_tree_core",
    "set_mamba_component",
    "state_lock_receipt",
    "tree_components",
    "unregister_tree_core",
    "wants_backup",
]

_BACKEND = "statecache"


# The classes and names of the engine.


def mamba_component() -> type[MambaComponent]:
    """SGLang's component for recurrent states."""
    component: type[MambaComponent] = load(at.COMPONENTS).MambaComponent
    return component


def python_tree_core() -> type[PythonTreeCore]:
    """SGLang's tree core in Python."""
    core: type[PythonTreeCore] = load(at.PYTHON_CORE).UnifiedTreeCore
    return core


def rust_tree_core() -> Any:
    """SGLang's tree core in Rust."""
    return load(at.RUST_CORE).RustUnifiedTreeCore


def mamba_type() -> ComponentType:
    """The name of the recurrent state among the components."""
    name: ComponentType = load(at.COMPONENTS).ComponentType.MAMBA
    return name


def full_type() -> ComponentType:
    """The name of the attention KV among the components."""
    name: ComponentType = load(at.COMPONENTS).ComponentType.FULL
    return name


def match_end_phase() -> object:
    """The phase in which `refresh_lru` names the node a match ended at."""
    phase: object = load(at.COMPONENTS).LRURefreshPhase.MATCH_END
    return phase


# What is done to the engine's own objects.


def is_evictable_device_leaf(core: PythonCore, node_id: int) -> bool:
    """Whether the Python core would drop this node whole."""
    return core.node_by_id(node_id) in core.evictable_device_leaves


def drop_inner_state(
    core: Any,
    component: MambaComponent,
    node_id: int,
    tracker: Tracker,
    device_frees: Frees,
    host_frees: Frees,
    **actions: list[object],
) -> None:
    """Drop the device state of an inner node of the Python core; its KV stays.

    The two calls that `MambaComponent._evict_device_next_node` of SGLang makes. `actions`: where
    the walk is given a list `cache_actions`, as since 0.5.23.
    """
    node = core.node_by_id(node_id)
    sinks = {"device_frees": device_frees, "host_frees": host_frees, **actions}
    layer = load(at.COMPONENTS).EvictLayer.DEVICE
    core._evict_component_and_detach_lru(  # noqa: SLF001
        node, component, target=layer, tracker=tracker, **sinks
    )
    core._cascade_evict(node, component, tracker, **sinks)  # noqa: SLF001


def no_step() -> WalkStep:
    """Return a walk step that found nothing."""
    step: WalkStep = load(at.INTERFACE).EvictDeviceNextNodeResult()
    return step


def leaf_step(node_id: int) -> WalkStep:
    """Return a walk step that asks the caller to drop a leaf."""
    result = load(at.INTERFACE).EvictDeviceNextNodeResult
    step: WalkStep = result(node_id=node_id, made_progress=True)
    return step


def inner_step() -> InnerStep:
    """Return a walk step that is going to drop one inner state."""
    step: InnerStep = load(at.INTERFACE).EvictDeviceNextNodeResult(made_progress=True)
    return step


class UnlimitedPathStates:
    """The Rust core's bindings, with `mamba_max_states_per_path` 0 where the user set none.

    `applied` says whether it was. The core then asks for `evict_excess_path_states` after every
    insert (`MambaEvictExcessPathStates`); `drop_path_requests` takes that back.
    """

    def __init__(self, bindings: Any, *, wanted: bool) -> None:
        self._bindings = bindings
        self._wanted = wanted
        self.applied = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bindings, name)

    def TreeCoreInitParamsBinding(self, **options: object) -> object:  # noqa: N802
        """As the binding's own."""
        if self._wanted and options["mamba_max_states_per_path"] is None:
            options["mamba_max_states_per_path"] = 0
            self.applied = True
        made: object = self._bindings.TreeCoreInitParamsBinding(**options)
        return made


def path_clearing_bindings(*, unless: bool) -> UnlimitedPathStates:
    """Return the Rust core's bindings for a core that is to clear paths on demand."""
    bindings = rust_tree_core()._bindings  # noqa: SLF001
    return UnlimitedPathStates(bindings, wanted=not unless)


def drop_path_requests(actions: list[object]) -> None:
    """Remove the requests for `evict_excess_path_states` from the actions of an insert step."""
    request = load(at.ACTIONS).MambaEvictExcessPathStates
    actions[:] = [action for action in actions if not isinstance(action, request)]


def state_lock_receipt(
    bindings: UnlimitedPathStates, node_id: int, skipped: Sequence[int]
) -> object:
    """Return what the Rust core wants back for a lock of one node's state alone."""
    receipt: object = bindings.DecLockRefParamsBinding(
        node_id=node_id,
        skipped_lock_components=skipped,
        component_lock_uuids={},
        component_host_lock_uuids={},
    )
    return receipt


# Copies of states on the host (HiCache).


def wants_backup(core: PythonCore, node_id: int) -> bool:
    """Whether the Python core would copy this inner state to the host before it drops it.

    As `MambaComponent._evict_device_next_node` of SGLang 0.5.23: only with write-back.
    """
    if not (core.enable_hicache and core.is_write_back):
        return False
    node = core.node_by_id(node_id)
    host_copy = node.component_data[mamba_type()].host_value
    kv = node.component_data[full_type()].value
    return host_copy is None and not node.backuped and kv is not None


def backup_request(node_id: int) -> object:
    """Return what the Python core's walk says to have an inner state copied to the host first."""
    request: object = load(at.COMPONENTS).InternalStateBackup(node_id=node_id, num_tokens=1)
    return request


def match_ending_at(
    core: TreeCore, node_id: int, req: Request
) -> tuple[MatchParameters, MatchResult]:
    """Return the parameters and the result of a match that gives `req` the state of a node.

    What `MambaComponent.finalize_match_result_in_cache` of SGLang 0.5.23 reads of them.
    """
    params = load(at.PREFIX_CACHE).MatchPrefixParams
    match: Any = core.empty_match_result
    return params(key=None, cow_mamba=True, req=req), match._replace(best_match_node=node_id)


def match_ending_earlier(match: Any, node_id: int, depth: int) -> MatchResult:
    """Return what the match would be if this node above its end, at `depth`, were its end.

    Without host copies, as with the int8 pool: the one end is that of all three. The states below
    are there, so none is asked for that SGLang did not ask for.
    """
    ends = dict.fromkeys(("best_match_node", "last_device_node", "last_host_node"), node_id)
    shorter: MatchResult = match._replace(device_prefix_len=depth, **ends)
    return shorter


# Which tree core a cache gets.


Build = Callable[[CacheParameters, Mapping[ComponentType, MambaComponent]], object]
Select = Callable[[CacheParameters], str]


def register_tree_core(build: Build) -> None:
    """Add the plugin's tree core to SGLang's. Raises `SeamError` when its name is taken."""
    registry = load(at.REGISTRY)
    if registry.get_tree_core_factory(_BACKEND) is not None:
        raise SeamError(f"another tree core is already registered as '{_BACKEND}'")
    registry.register_tree_core_backend(_BACKEND, build)


def unregister_tree_core() -> None:
    """Take it out again."""
    load(at.REGISTRY)._TREE_CORE_REGISTRY.pop(_BACKEND, None)  # noqa: SLF001


def set_mamba_component(component: type[MambaComponent]) -> type[MambaComponent]:
    """Have caches built with this component for recurrent states; return the one before."""
    components = load(at.CACHE).COMPONENT_REGISTRY
    before: type[MambaComponent] = components[mamba_type()]
    components[mamba_type()] = component
    return before


def resolve_tree_core(select: Select, params: CacheParameters) -> str:
    """Return the tree core that SGLang itself takes for this cache: "rust" or "python"."""
    name = select(params)
    if name != _BACKEND:
        return name
    resolved: str = load(at.REGISTRY).resolve_tree_core_backend("rust", params)
    return resolved


def choose_tree_core(name: str, *, managed: bool) -> str:
    """Return the name of the tree core to build: the plugin's for a cache that it manages."""
    return _BACKEND if managed else name


def tree_components(params: CacheParameters) -> Sequence[str]:
    """Return the names of the components of a cache that is about to be built."""
    return tuple(component.name for component in params.tree_components)
