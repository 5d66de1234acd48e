"""What statecache uses of SGLang. Only the files named `...seams` take anything from it.

(`cache_layer` too, which builds a cache without a server.) SGLang is imported inside the
functions: loading the plugin must not load the engine.
"""

from __future__ import annotations

import functools
import importlib
import operator
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, Protocol

from statecache_sglang import engine_paths as at

__all__ = [
    "NO_CHECKPOINT",
    "NO_SLOT",
    "AroundPatch",
    "NoPathLimit",
    "Patch",
    "TreeCorePatch",
    "admission_patch",
    "ask_for_int8",
    "drop_internal_state",
    "drop_path_requests",
    "engine_version",
    "evict_states",
    "free_state_slots",
    "full_type",
    "hook_engine_arguments",
    "hook_server_args",
    "inner_step",
    "is_evictable_device_leaf",
    "is_hybrid_pool",
    "is_resolved",
    "leaf_step",
    "load",
    "mamba_component",
    "mamba_type",
    "match_end_phase",
    "missing_state_slots",
    "no_room",
    "no_step",
    "path_clearing_bindings",
    "python_tree_core",
    "rust_tree_core",
    "set_chunk_size",
    "state_lock_receipt",
    "tree_components",
]

_BACKEND = "statecache"

# What SGLang asserts when no slot can be had (MambaComponent._alloc_mamba_slot,
# _alloc_int8_ckpt_slot).
NO_SLOT = "Can not alloc mamba cache"
NO_CHECKPOINT = "Can not alloc int8 mamba checkpoint slot"


@functools.cache
def load(name: str) -> Any:
    """Import a module of SGLang."""
    return importlib.import_module(name)


def engine_version() -> str:
    """Return the version of SGLang that is installed."""
    return version("sglang")


def set_chunk_size(server_args: Any, tokens: int) -> None:
    """Say what a model's configuration would: how many tokens a chunk of its kernels has."""
    server_args._mamba_cache_chunk_size = tokens  # noqa: SLF001 - it has no setter


# The classes and names of the engine.


def mamba_component() -> Any:
    """SGLang's component for recurrent states."""
    return load(at.COMPONENTS).MambaComponent


def python_tree_core() -> Any:
    """SGLang's tree core in Python."""
    return load(at.PYTHON_CORE).UnifiedTreeCore


def rust_tree_core() -> Any:
    """SGLang's tree core in Rust."""
    return load(at.RUST_CORE).RustUnifiedTreeCore


def mamba_type() -> Any:
    """The name of the recurrent state among the components."""
    return load(at.COMPONENTS).ComponentType.MAMBA


def full_type() -> Any:
    """The name of the attention KV among the components."""
    return load(at.COMPONENTS).ComponentType.FULL


def match_end_phase() -> Any:
    """The phase in which `refresh_lru` names the node a match ended at."""
    return load(at.COMPONENTS).LRURefreshPhase.MATCH_END


# What is done to the engine's own objects.


def is_evictable_device_leaf(core: Any, node_id: int) -> bool:
    """Whether the Python core would drop this node whole."""
    return core.node_by_id(node_id) in core.evictable_device_leaves


def drop_internal_state(
    core: Any,
    component: Any,
    node_id: int,
    tracker: Any,
    device_frees: Any,
    host_frees: Any,
    cache_actions: list[Any],
) -> None:
    """Drop the device state of an inner node of the Python core; its KV stays.

    The two calls that `MambaComponent._evict_device_next_node` of SGLang 0.5.23 makes.
    """
    node = core.node_by_id(node_id)
    sinks = {"device_frees": device_frees, "host_frees": host_frees}
    layer = load(at.COMPONENTS).EvictLayer.DEVICE
    core._evict_component_and_detach_lru(  # noqa: SLF001
        node, component, target=layer, tracker=tracker, cache_actions=cache_actions, **sinks
    )
    core._cascade_evict(  # noqa: SLF001
        node, component, tracker, cache_actions=cache_actions, **sinks
    )


def no_step() -> Any:
    """Return a walk step that found nothing."""
    return load(at.INTERFACE).EvictDeviceNextNodeResult()


def leaf_step(node_id: int) -> Any:
    """Return a walk step that asks the caller to drop a leaf."""
    return load(at.INTERFACE).EvictDeviceNextNodeResult(node_id=node_id, made_progress=True)


def inner_step() -> Any:
    """Return a walk step that is going to drop one inner state."""
    return load(at.INTERFACE).EvictDeviceNextNodeResult(made_progress=True)


class NoPathLimit:
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

    def TreeCoreInitParamsBinding(self, **options: Any) -> Any:  # noqa: N802
        """As the binding's own."""
        if self._wanted and options["mamba_max_states_per_path"] is None:
            options["mamba_max_states_per_path"] = 0
            self.applied = True
        return self._bindings.TreeCoreInitParamsBinding(**options)


def path_clearing_bindings(*, unless: bool) -> NoPathLimit:
    """Return the Rust core's bindings for a core that is to clear paths on demand."""
    return NoPathLimit(rust_tree_core()._bindings, wanted=not unless)  # noqa: SLF001


def drop_path_requests(actions: list[Any]) -> None:
    """Remove the requests for `evict_excess_path_states` from the actions of an insert step."""
    request = load(at.ACTIONS).MambaEvictExcessPathStates
    actions[:] = [action for action in actions if not isinstance(action, request)]


def state_lock_receipt(bindings: Any, node_id: int, skipped: list[int]) -> Any:
    """Return what the Rust core wants back for a lock of one node's state alone."""
    return bindings.DecLockRefParamsBinding(
        node_id=node_id,
        skipped_lock_components=skipped,
        component_lock_uuids={},
        component_host_lock_uuids={},
    )


def hook_server_args(
    add_cli_args: Callable[..., Any],
    from_cli_args: Callable[..., Any],
    before_resolution: Callable[..., Any],
) -> None:
    """Have the flags added to SGLang's parser and read from it, and every configuration seen.

    A record of `ServerArgs` takes no foreign fields, and its constructor cannot be wrapped.
    """
    registry = load("sglang.srt.plugins.hook_registry")
    register, kinds = registry.HookRegistry.register, registry.HookType
    owner = "sglang.srt.server_args.ServerArgs"
    register(f"{owner}.add_cli_args", add_cli_args, kinds.AFTER)
    register(f"{owner}.from_cli_args", from_cli_args, kinds.AROUND)
    register(f"{owner}.resolve_once", before_resolution, kinds.BEFORE)


def hook_engine_arguments(around: Callable[..., Any]) -> None:
    """Have `Engine(...)` take the plugin's arguments, where `Engine` is loaded.

    `Engine.__init__` of SGLang 0.5.23 loads the plugins, then builds `server_args_class(**kwargs)`.
    """
    module: Any = sys.modules.get(at.ENGINE)
    if module is None or hasattr(module.Engine, "_statecache"):
        return
    module.Engine._statecache = True  # noqa: SLF001
    original = module.Engine.server_args_class

    @functools.wraps(original, updated=())
    def server_args_class(**kwargs: Any) -> Any:
        return around(original, **kwargs)

    module.Engine.server_args_class = staticmethod(server_args_class)


def is_resolved(server_args: Any) -> bool:
    """Whether `ServerArgs.resolve_once` ran already: the record can no longer be changed."""
    return bool(getattr(server_args, "_resolution_finished", False))


def ask_for_int8(server_args: Any, slots: int | None) -> None:
    """Have SGLang treat this server as one with an int8 pool, its own refusals included."""
    server_args.enable_int8_mamba_checkpoint = True
    server_args.int8_mamba_ckpt_size = slots


# State slots of running requests.


def is_hybrid_pool(pool: Any) -> bool:
    """Whether requests of this pool hold recurrent states."""
    return isinstance(pool, load(at.POOL).HybridReqToTokenPool)


def free_state_slots(allocator: Any) -> int:
    """Return how many slots `alloc(1)` could still give, those set aside for a batch included."""
    set_aside = operator.length_hint(allocator._alloc_iter or ())  # noqa: SLF001
    return int(allocator.schedulable_available_size()) + set_aside


def missing_state_slots(pool: Any, req: Any) -> int:
    """Return how many slots `HybridReqToTokenPool.alloc` will take for this request."""
    needed = 0 if req.kv.holds_mamba else 1
    if req.kv.mamba_ping_pong_track_buffer is None:
        needed += pool.mamba_initial_tracking_slots
    return needed


def evict_states(cache: Any, count: int) -> None:
    """Have SGLang make room for so many state slots."""
    params = load("sglang.srt.mem_cache.base_prefix_cache").EvictParams
    cache.evict_for_alloc(params(num_tokens=0, mamba_num=count))


def no_room() -> Any:
    """What `PrefillAdder.add_one_req` says of a request that must wait for memory."""
    return load(at.ADDER).AddReqResult.NO_TOKEN


class Patch(Protocol):
    """A change of SGLang that can be taken back."""

    def install(self) -> None:
        """Make it."""

    def remove(self) -> None:
        """Take it back."""


class AroundPatch:
    """Puts a wrapper around a method of SGLang, and takes it off again.

    What another plugin put around the wrapper stays; inside it nothing of ours is done any more.
    """

    def __init__(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        self._owner = owner
        self._name = name
        self._original = getattr(owner, name)
        self._around = around
        self._wrapper: Callable[..., Any] | None = None

    def install(self) -> None:
        """Put it on."""
        original, around = self._original, self._around

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self._wrapper is not wrapper:
                return original(*args, **kwargs)
            return around(original, *args, **kwargs)

        self._wrapper = wrapper
        setattr(self._owner, self._name, wrapper)

    def remove(self) -> None:
        """Take it off."""
        wrapper, self._wrapper = self._wrapper, None
        if getattr(self._owner, self._name) is wrapper:
            setattr(self._owner, self._name, self._original)


def admission_patch(around: Callable[..., Any]) -> Patch:
    """Return a patch that puts `around` around `PrefillAdder.add_one_req`."""
    return AroundPatch(load(at.ADDER).PrefillAdder, "add_one_req", around)


class TreeCorePatch:
    """Puts the component and the tree cores in SGLang's place, and back.

    `decide(params, name)` sees the tree core SGLang chose and returns whether to lead it;
    `build(params, components, name)` makes that core.
    """

    def __init__(
        self,
        component: Any,
        decide: Callable[[Any, str], bool],
        build: Callable[[Any, Any, str], Any],
    ) -> None:
        self._component = component
        self._decide = decide
        self._build = build
        self._cache: Any = load(at.CACHE)
        self._registry: Any = load(at.REGISTRY)
        self._select = self._cache.select_tree_core_backend
        self._original_component = self._cache.COMPONENT_REGISTRY[mamba_type()]

    def install(self) -> None:
        """Take the place. Raises `SeamError` when another plugin already has the backend's name."""
        if self._registry.get_tree_core_factory(_BACKEND) is not None:
            from statecache.errors import SeamError

            raise SeamError(f"another tree core is already registered as '{_BACKEND}'")
        self._registry.register_tree_core_backend(_BACKEND, self._factory)
        self._cache.COMPONENT_REGISTRY[mamba_type()] = self._component
        self._cache.select_tree_core_backend = self._selected

    def remove(self) -> None:
        """Give the place back."""
        self._registry._TREE_CORE_REGISTRY.pop(_BACKEND, None)  # noqa: SLF001
        self._cache.COMPONENT_REGISTRY[mamba_type()] = self._original_component
        self._cache.select_tree_core_backend = self._select

    def _chosen(self, params: Any) -> str:
        name: str = self._select(params)
        if name != _BACKEND:
            return name
        resolved: str = self._registry.resolve_tree_core_backend("rust", params)
        return resolved

    def _selected(self, params: Any) -> str:
        name = self._chosen(params)
        return _BACKEND if self._decide(params, name) else name

    def _factory(self, params: Any, components: Any) -> Any:
        return self._build(params, components, self._chosen(params))


def tree_components(params: Any) -> Sequence[str]:
    """Return the names of the components of a cache that is about to be built."""
    return tuple(component.name for component in params.tree_components)
