"""Everything statecache uses of SGLang. No other file of this package imports it.

SGLang is imported inside the functions: loading the plugin must not load the engine.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

__all__ = [
    "SEAMS",
    "TESTED",
    "Seam",
    "SeamError",
    "TreeCorePatch",
    "drop_internal_state",
    "engine_version",
    "full_type",
    "hook_server_args",
    "is_evictable_device_leaf",
    "leaf_step",
    "mamba_component",
    "mamba_type",
    "match_end_phase",
    "no_step",
    "probe",
    "python_tree_core",
    "refuse_hierarchical_cache",
    "rust_tree_core",
    "state_lock_receipt",
    "tree_components",
]

TESTED = ("0.5.23",)

_COMPONENTS = "sglang.srt.mem_cache.unified_cache.components"
_PYTHON_CORE = "sglang.srt.mem_cache.unified_cache.unified_tree_core"
_RUST_CORE = "sglang.srt.mem_cache.rust_tree_core.adapter"
_INTERFACE = "sglang.srt.mem_cache.unified_cache.unified_tree_core_interface"
_REGISTRY = "sglang.srt.mem_cache.unified_cache.tree_core_registry"
_CACHE = "sglang.srt.mem_cache.unified_radix_cache"
_BACKEND = "statecache"


class SeamError(RuntimeError):
    """A seam is not as it was in the tested versions: nothing was installed."""


@dataclasses.dataclass(frozen=True)
class Seam:
    """One thing of SGLang that is used, and what must hold for it."""

    module: str
    path: str
    parameters: tuple[str, ...] = ()
    base: str | None = None

    def state(self) -> str:
        """Return "ok", "missing", or "moved" with what is different."""
        try:
            found: Any = importlib.import_module(self.module)
            for name in self.path.split("."):
                found = inspect.getattr_static(found, name)
        except (ImportError, AttributeError):
            return "missing"
        if isinstance(found, staticmethod | classmethod):
            found = found.__func__
        if self.base is not None and self.base not in [b.__name__ for b in found.__mro__[1:]]:
            return f"moved (no longer a {self.base})"
        if self.parameters:
            names = tuple(inspect.signature(found).parameters)
            if names != self.parameters:
                return f"moved (takes {', '.join(names)})"
        return "ok"


def _seams(module: str, owner: str, methods: dict[str, str]) -> tuple[Seam, ...]:
    return tuple(
        Seam(module, f"{owner}.{name}", ("self", *parameters.split()))
        for name, parameters in methods.items()
    )


_WALK = "tracker device_frees host_frees cache_actions"
_EVICT = "device_frees host_frees cache_actions target"

SEAMS: tuple[Seam, ...] = (
    Seam("sglang.srt.server_args", "ServerArgs.add_cli_args"),
    Seam("sglang.srt.server_args", "ServerArgs.from_cli_args", ("cls", "args")),
    Seam(_COMPONENTS, "MambaComponent", ("cache", "params"), base="TreeComponent"),
    *_seams(
        f"{_COMPONENTS}.mamba",
        "MambaComponent",
        {
            "refresh_lru": "phase node root_node",
            "commit_insert_component_data": "node is_new_leaf params result cache_actions",
            "evict_component": f"node {_EVICT}",
            "release_component_lock": "node params lock_host",
            "_evict_device_start": "request_cnt",
            "_evict_device_next_node": _WALK,
            "_evict_device_end": "",
        },
    ),
    Seam(_COMPONENTS, "LRURefreshPhase.MATCH_END"),
    Seam(_COMPONENTS, "ComponentType.MAMBA"),
    Seam(_COMPONENTS, "EvictLayer.DEVICE"),
    Seam(_PYTHON_CORE, "UnifiedTreeCore", ("params", "components")),
    *_seams(
        _PYTHON_CORE,
        "UnifiedTreeCore",
        {
            "reset": "",
            "node_by_id": "node_id",
            "set_component_device_value": "node_id component_type value",
            "set_hicache_enabled": "",
            "_evict_component_and_detach_lru": f"node comp {_EVICT} tracker",
            "_cascade_evict": "node trigger tracker device_frees host_frees cache_actions target",
        },
    ),
    Seam(_RUST_CORE, "RustUnifiedTreeCore", ("params",), base="UnifiedTreeCoreInterface"),
    *_seams(
        _RUST_CORE,
        "RustUnifiedTreeCore",
        {
            "reset": "",
            "match_prefix": "params",
            "begin_insert": "params",
            "resume_insert": "",
            "is_root": "node_id",
            "inc_lock_ref": "node_id skip_lock_components",
            "dec_lock_ref": "node_id params skip_swa",
            "inc_full_pin": "node_id",
            "dec_full_pin": "node_id",
            "evict_device_start": "component_type request_cnt",
            "evict_device_next_node": "component_type tracker",
            "evict_device_end": "component_type",
            "evict_device_leaf": "node_id is_write_back",
            "evict_excess_path_states": "tail_node_id device_frees host_frees cache_actions",
            "get_component_device_value": "node_id component_type",
            "set_component_device_value": "node_id component_type value",
            "set_hicache_enabled": "",
        },
    ),
    *(
        Seam("sglang.srt.mem_cache.rust_tree_core.mem_cache", name)
        for name in (
            "DecLockRefParamsBinding",
            "RustUnifiedTreeCoreBinding.collect_path_info",
            "RustUnifiedTreeCoreBinding.inc_lock_ref",
            "RustUnifiedTreeCoreBinding.dec_lock_ref",
        )
    ),
    Seam(_INTERFACE, "EvictDeviceNextNodeResult"),
    Seam(_REGISTRY, "register_tree_core_backend", ("name", "factory")),
    Seam(_REGISTRY, "resolve_tree_core_backend", ("name", "params")),
    Seam(_CACHE, "select_tree_core_backend", ("params",)),
    Seam(_CACHE, "COMPONENT_REGISTRY"),
)


def engine_version() -> str:
    """Return the version of SGLang that is installed."""
    return version("sglang")


def probe() -> list[tuple[str, str]]:
    """Look at every seam; return its name and "ok", "moved ..." or "missing"."""
    return [(f"{seam.module}.{seam.path}", seam.state()) for seam in SEAMS]


# The classes and names of the engine.


def mamba_component() -> Any:
    """SGLang's component for recurrent states."""
    return importlib.import_module(_COMPONENTS).MambaComponent


def python_tree_core() -> Any:
    """SGLang's tree core in Python."""
    return importlib.import_module(_PYTHON_CORE).UnifiedTreeCore


def rust_tree_core() -> Any:
    """SGLang's tree core in Rust."""
    return importlib.import_module(_RUST_CORE).RustUnifiedTreeCore


def mamba_type() -> Any:
    """The name of the recurrent state among the components."""
    return importlib.import_module(_COMPONENTS).ComponentType.MAMBA


def full_type() -> Any:
    """The name of the attention KV among the components."""
    return importlib.import_module(_COMPONENTS).ComponentType.FULL


def match_end_phase() -> Any:
    """The phase in which `refresh_lru` names the node a match ended at."""
    return importlib.import_module(_COMPONENTS).LRURefreshPhase.MATCH_END


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
    layer = importlib.import_module(_COMPONENTS).EvictLayer.DEVICE
    core._evict_component_and_detach_lru(  # noqa: SLF001
        node, component, target=layer, tracker=tracker, cache_actions=cache_actions, **sinks
    )
    core._cascade_evict(  # noqa: SLF001
        node, component, tracker, cache_actions=cache_actions, **sinks
    )


def no_step() -> Any:
    """Return a walk step that found nothing."""
    return importlib.import_module(_INTERFACE).EvictDeviceNextNodeResult()


def leaf_step(node_id: int) -> Any:
    """Return a walk step that asks the caller to drop a leaf."""
    return importlib.import_module(_INTERFACE).EvictDeviceNextNodeResult(
        node_id=node_id, made_progress=True
    )


def state_lock_receipt(bindings: Any, node_id: int, skipped: list[int]) -> Any:
    """Return what the Rust core wants back for a lock of one node's state alone."""
    return bindings.DecLockRefParamsBinding(
        node_id=node_id,
        skipped_lock_components=skipped,
        component_lock_uuids={},
        component_host_lock_uuids={},
    )


def refuse_hierarchical_cache() -> None:
    """Stop: a state that lives on the host alone is not ranked by this release."""
    raise SystemExit(
        "statecache: --enable-hierarchical-cache is not supported with --kv-cache-plugin statecache"
    )


def hook_server_args(
    add_cli_args: Callable[..., Any],
    from_cli_args: Callable[..., Any],
    constructor: Callable[..., Any],
) -> None:
    """Have the flags added to SGLang's parser, read from it, and taken by `ServerArgs(...)`."""
    registry = importlib.import_module("sglang.srt.plugins.hook_registry")
    register, kinds = registry.HookRegistry.register, registry.HookType
    owner = "sglang.srt.server_args.ServerArgs"
    register(f"{owner}.add_cli_args", add_cli_args, kinds.AFTER)
    register(f"{owner}.from_cli_args", from_cli_args, kinds.AROUND)
    register(f"{owner}.__init__", constructor, kinds.AROUND)


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
        self._cache: Any = importlib.import_module(_CACHE)
        self._registry: Any = importlib.import_module(_REGISTRY)
        self._select = self._cache.select_tree_core_backend
        self._original_component = self._cache.COMPONENT_REGISTRY[mamba_type()]

    def install(self) -> None:
        """Take the place. Raises `SeamError` when another plugin already has the backend's name."""
        if self._registry.get_tree_core_factory(_BACKEND) is not None:
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
