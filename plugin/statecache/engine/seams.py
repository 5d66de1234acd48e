"""A seam: one thing of an engine that an adapter uses, and the check of what is installed.

Nothing of the engine is imported before a seam is looked at.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import logging
from collections.abc import Sequence
from typing import Any

from statecache.engine.patching import original_function
from statecache.engine.settings_schema import flag_of
from statecache.engine.views import View, probe_views
from statecache.errors import SeamError, group_by_reason

__all__ = [
    "Seam",
    "check",
    "check_native",
    "methods",
    "probe",
    "replaced",
]


@dataclasses.dataclass(frozen=True)
class Seam:
    """One thing of an engine that is used, and what must hold for it.

    `public`, of a class that is replaced: all it may have that others could call. `code`, of a
    function that is replaced: all the names that its code may use. `replaced`, of a function whose
    place the adapter takes: that it is the engine's own, since nothing around it would be called.
    """

    module: str
    path: str
    parameters: tuple[str, ...] = ()
    base: str | None = None
    public: tuple[str, ...] | None = None
    code: tuple[str, ...] | None = None
    replaced: bool = False

    @property
    def target(self) -> str:
        """The place of this thing, "module:Class.attribute"."""
        return f"{self.module}:{self.path}"

    def state(self) -> str:
        """Return "ok", "missing", or "moved" with what is different.

        A module that is there and cannot be imported is missing, with the reason.
        """
        try:
            found: Any = importlib.import_module(self.module)
            owner = found
            for name in self.path.split("."):
                owner, found = found, inspect.getattr_static(found, name)
        except AttributeError:
            return "missing"
        except ImportError as error:
            there = not self.module.startswith(f"{error.name}.") and error.name != self.module
            return f"missing ({error})" if there else "missing"
        if isinstance(found, staticmethod | classmethod):
            found = found.__func__
        if self.base is not None and self.base not in [b.__name__ for b in found.__mro__[1:]]:
            return f"moved (no longer a {self.base})"
        if self.public is not None:
            more = {name for name in vars(found) if not name.startswith("_")} - {*self.public}
            if more:
                return f"moved (has {', '.join(sorted(more))}, too)"
        if self.code is not None:
            code = getattr(found, "__code__", None)
            more = {*code.co_names} - {*self.code} if code else {"what cannot be read"}
            if more:
                return f"moved (uses {', '.join(sorted(more))}, too)"
        if self.parameters:
            names = tuple(inspect.signature(found).parameters)
            if names != self.parameters:
                return f"moved (takes {', '.join(names)})"
        if self.replaced and original_function(owner, name) is None:
            return f"moved (another plugin changed it: {_place(found)})"
        return "ok"


def _place(function: Any) -> str:
    """Return where a function, or what is in the place of one, was written."""
    code = getattr(function, "__code__", None)
    module = getattr(function, "__globals__", {}).get("__name__", "")
    return f"{module}.{code.co_qualname}" if code else type(function).__qualname__


def probe(seams: Sequence[Seam], views: Sequence[View] = ()) -> list[tuple[str, str]]:
    """Look at every seam and view; return its name and "ok", "moved ..." or "missing"."""
    states = {f"{seam.module}.{seam.path}": seam.state() for seam in seams}
    return [*states.items(), *((name, at) for name, at in probe_views(views) if name not in states)]


def check(
    engine: str,
    version: str,
    seams: Sequence[Seam],
    tested: Sequence[str],
    *,
    strict: bool,
    log: logging.Logger,
    views: Sequence[View] = (),
) -> None:
    """Raise `SeamError` unless every seam is in place; warn about a version that is not `tested`.

    With `strict` that raises too. `engine` is the name for people.
    """
    broken = [(name, state) for name, state in probe(seams, views) if state != "ok"]
    if broken:
        reasons = group_by_reason(broken, "statecache doctor --seams")
        said = "; ".join(f"{names}: {state}" for state, names in reasons)
        raise SeamError(f"{engine} {version} does not fit: {said}")
    if version not in tested:
        what = f"{engine} {version} was not tested (tested: {', '.join(tested)})"
        if strict:
            raise SeamError(f"{what} and {flag_of('strict')} is on")
        log.warning("statecache: %s; every seam is in place, going on", what)


def check_native(*modules: str) -> None:
    """Raise `SeamError` unless these parts of the plugin's extension load."""
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise SeamError(
                f"{name} does not load: reinstall statecache with pip in this Python ({error})"
            ) from error


def methods(module: str, owner: str, parameters: dict[str, str]) -> tuple[Seam, ...]:
    """Return the seams of some methods of a class, by name and what they take after `self`."""
    return tuple(
        Seam(module, f"{owner}.{name}", ("self", *taken.split()))
        for name, taken in parameters.items()
    )


def replaced(module: str, owner: str, parameters: dict[str, str]) -> tuple[Seam, ...]:
    """Return the seams of a class in whose place the adapter puts its own, which has no more."""
    own = Seam(module, owner, public=tuple(parameters))
    taken = methods(module, owner, parameters)
    return (own, *(dataclasses.replace(seam, replaced=True) for seam in taken))
