"""A seam: one thing of an engine that an adapter uses, and the check of what is installed.

Nothing of the engine is imported before a seam is looked at. No version is compared: a seam has
every form that the adapter can use, and what must choose between them asks which one is there.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from statecache.engine.patching import original_function
from statecache.engine.settings_schema import flag_of
from statecache.engine.versions import describe_broken
from statecache.engine.views import View, is_listed, lacking, off, probe_views, what_is_off
from statecache.errors import SeamError

__all__ = [
    "Facts",
    "Seam",
    "check",
    "check_native",
    "features_off",
    "has",
    "is_broken",
    "methods",
    "probe",
    "replaced",
    "worst_of_each",
]


@dataclasses.dataclass(frozen=True)
class Seam:
    """One thing of an engine that is used, and what must hold for it.

    `parameters` are what a function takes, `variants` other signatures that will do, too. `fields`,
    of a class, are what its objects must have: of a named tuple all it has, in order, since it is
    unpacked. `items` is how many items a tuple has that a function returns, or that an attribute
    holds, by its annotation. `public`, of a class that is replaced: all it may have that others
    could call. `code`, of a function that is replaced: all the names that its code may use.
    `replaced`, of a function whose place the adapter takes: that it is the engine's own, since
    nothing around it would be called.

    With `optional`, the name of a feature, only that feature is off where the seam is not in place.
    """

    module: str
    path: str
    parameters: tuple[str, ...] = ()
    variants: tuple[tuple[str, ...], ...] = ()
    fields: tuple[str, ...] = ()
    items: int | None = None
    base: str | None = None
    public: tuple[str, ...] | None = None
    code: tuple[str, ...] | None = None
    replaced: bool = False
    optional: str = ""

    @property
    def target(self) -> str:
        """The place of this thing, "module:Class.attribute"."""
        return f"{self.module}:{self.path}"

    def state(self) -> str:
        """Return "ok", "missing", or "moved" with what is different.

        A module that is there and cannot be imported is missing, with the reason. Of an `optional`
        seam that is not in place: "off", with its feature and the reason.
        """
        return self.or_off(self._look())

    def or_off(self, state: str) -> str:
        """Return a state, of an `optional` seam as what it turns off."""
        return state if state == "ok" or not self.optional else off(self.optional, state)

    def _look(self) -> str:
        try:
            owner, found = _find(self.module, self.path)
        except AttributeError:
            return "missing"
        except ImportError as error:
            there = not self.module.startswith(f"{error.name}.") and error.name != self.module
            return f"missing ({error})" if there else "missing"
        return self.judge(_Installed(owner, self.path.rpartition(".")[2], found))

    def judge(self, facts: Facts) -> str:
        """Return "ok", or "moved" with what is different, of what is known of the thing."""
        difference = next(self._differences(facts), None)
        return "ok" if difference is None else f"moved ({difference})"

    def _differences(self, facts: Facts) -> Iterator[str]:
        if self.base is not None and self.base not in facts.bases():
            yield f"no longer a {self.base}"
        if self.public is not None:
            more = {name for name in facts.names() if not name.startswith("_")} - {*self.public}
            if more:
                yield f"has {', '.join(sorted(more))}, too"
        if self.fields:
            yield from self._differing_fields(facts)
        if self.code is not None:
            used = facts.names_used()
            more = {"what cannot be read"} if used is None else used - {*self.code}
            if more:
                yield f"uses {', '.join(sorted(more))}, too"
        if self.parameters:
            names = facts.parameters()
            if names is not None and names not in (self.parameters, *self.variants):
                yield f"takes {', '.join(names) or 'nothing'}"
        if self.items is not None:
            items = _items(facts.annotation())
            if items != self.items:
                yield f"has {items} items" if items else "has an unknown number of items"
        if self.replaced:
            place = facts.changed_by()
            if place is not None:
                yield f"another plugin changed it: {place}"

    def _differing_fields(self, facts: Facts) -> Iterator[str]:
        tuple_fields = facts.tuple_fields()
        if tuple_fields is not None:
            if tuple_fields != self.fields:
                yield f"has {', '.join(tuple_fields) or 'nothing'}"
            return
        gone = facts.lacking(self.fields)
        if gone:
            yield f"has no {', '.join(gone)}"


class Facts(Protocol):
    """What is known of a thing of an engine, installed or in its source."""

    def bases(self) -> Collection[str]:
        """The names of the classes that a class is made from, in any number of steps."""

    def names(self) -> Collection[str]:
        """The names that a class itself defines."""

    def tuple_fields(self) -> tuple[str, ...] | None:
        """The fields of a named tuple, None of anything else."""

    def lacking(self, names: Sequence[str]) -> list[str]:
        """Those of the names that no object of a class has, as `View` says."""

    def names_used(self) -> set[str] | None:
        """The names in the code of a function, None of what has no code."""

    def parameters(self) -> tuple[str, ...] | None:
        """What a function or a class takes, None where that is not known."""

    def annotation(self) -> object:
        """What is written of the type that a function returns, or that an attribute has."""

    def changed_by(self) -> str | None:
        """Where a function was written that is in the place of the engine's own."""


class _Installed:
    """What is known of a thing that was imported."""

    def __init__(self, owner: Any, name: str, found: Any) -> None:
        self._owner, self._name, self._found = owner, name, found

    def bases(self) -> Collection[str]:
        return [base.__name__ for base in self._found.__mro__[1:]]

    def names(self) -> Collection[str]:
        return [*vars(self._found)]

    def tuple_fields(self) -> tuple[str, ...] | None:
        fields = getattr(self._found, "_fields", None)
        return None if fields is None else tuple(fields)

    def lacking(self, names: Sequence[str]) -> list[str]:
        return lacking(self._found, names)

    def names_used(self) -> set[str] | None:
        code = getattr(self._found, "__code__", None)
        return {*code.co_names} if code else None

    def parameters(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self._found).parameters)

    def annotation(self) -> object:
        found = self._found
        said = inspect.signature(found).return_annotation if inspect.isfunction(found) else None
        return _annotation(self._owner, self._name) if said is None else said

    def changed_by(self) -> str | None:
        own = original_function(self._owner, self._name)
        return _place(self._found) if own is None else None


def _find(module: str, path: str) -> tuple[Any, Any]:
    """Return what has the thing at a place, and the thing as it is written.

    Of what a class only lists, as a dataclass a field without a default, that is its annotation.
    Raises `AttributeError` or `ImportError` where there is nothing.
    """
    owner: Any = None
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        owner = found
        try:
            found = inspect.getattr_static(owner, name)
        except AttributeError:
            if not (inspect.isclass(owner) and is_listed(name, owner.__mro__[:-1])):
                raise
            found = _annotation(owner, name)
    return owner, found.__func__ if isinstance(found, staticmethod | classmethod) else found


def _annotation(owner: Any, name: str) -> Any:
    for base in getattr(owner, "__mro__", [owner]):
        if name in vars(base).get("__annotations__", {}):
            return vars(base)["__annotations__"][name]
    return ""


def _items(said: object) -> int | None:
    """Return how long the outermost tuple of fixed length is, in what annotates a thing."""
    try:
        tree = ast.parse(said if isinstance(said, str) else inspect.formatannotation(said))
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Subscript)
            and ast.unparse(node.value).rpartition(".")[2] in ("tuple", "Tuple")
            and "..." not in [ast.unparse(item) for item in _elements(node.slice)]
        ):
            return len(_elements(node.slice))
    return None


def _elements(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple) else [node]


@functools.cache
def has(target: str, name: str) -> bool:
    """Whether the function at "module:Class.name" takes `name`, or the class there has it.

    What has several variants is asked so which of them is installed. Where nothing is, it has not.
    """
    module, _, path = target.partition(":")
    try:
        _, found = _find(module, path)
    except (AttributeError, ImportError):
        return False
    if inspect.isclass(found):
        return not lacking(found, [name])
    return name in inspect.signature(found).parameters


def _place(function: Any) -> str:
    """Return where a function, or what is in the place of one, was written."""
    code = getattr(function, "__code__", None)
    module = getattr(function, "__globals__", {}).get("__name__", "")
    return f"{module}.{code.co_qualname}" if code else type(function).__qualname__


def probe(seams: Sequence[Seam], views: Sequence[View] = ()) -> list[tuple[str, str]]:
    """Look at every seam and view; return the name of each and its state, as `Seam.state`."""
    found = [(f"{seam.module}.{seam.path}", seam.state()) for seam in seams]
    return worst_of_each([*found, *probe_views(views)])


def worst_of_each(found: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return each name once, with the worst of its states."""
    states: dict[str, str] = {}
    for name, state in found:
        states[name] = max(state, states.get(name, "ok"), key=_severity)
    return [*states.items()]


def _severity(state: str) -> int:
    return 0 if state == "ok" else 1 + is_broken(state)


def is_broken(state: str) -> bool:
    """Whether the plugin cannot work with a seam in this state."""
    return state != "ok" and what_is_off(state) is None


def features_off(states: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return the features that are off by what `probe` found, each with the first reason."""
    found: dict[str, str] = {}
    for name, state in states:
        feature = what_is_off(state)
        if feature is not None:
            found.setdefault(feature[0], f"{name}: {feature[1]}")
    return found


def check(
    engine: str,
    version: str,
    seams: Sequence[Seam],
    tested: Sequence[str],
    *,
    package: str,
    strict: bool,
    log: logging.Logger,
    views: Sequence[View] = (),
) -> Mapping[str, str]:
    """Raise `SeamError` unless every seam is in place; warn about a version that is not `tested`.

    With `strict` that raises too. `engine` is the name for people, `package` that for pip. Returns
    the features that are off for want of an optional seam, each with the reason, which is a line in
    the log.
    """
    states = probe(seams, views)
    broken = [(name, state) for name, state in states if is_broken(state)]
    if broken:
        raise SeamError(describe_broken(engine, package, version, tested, broken, len(states)))
    if version not in tested:
        what = f"{engine} {version} was not tested (tested: {', '.join(tested)})"
        if strict:
            raise SeamError(f"{what} and {flag_of('strict')} is on")
        log.warning("statecache: %s; no difference was found, going on", what)
    without = features_off(states)
    for feature, reason in without.items():
        log.warning("statecache: without %s in %s %s: %s", feature, engine, version, reason)
    return without


def check_native(*modules: str) -> None:
    """Raise `SeamError` unless these parts of the plugin's extension load."""
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise SeamError(
                f"{name} does not load: reinstall statecache with pip in this Python ({error})"
            ) from error


def methods(
    module: str, owner: str, parameters: Mapping[str, str], optional: str = ""
) -> tuple[Seam, ...]:
    """Return the seams of some methods of a class, by name and what they take after `self`.

    Signatures that will do, too, are parted by "|": "request | request limit".
    """
    return tuple(
        _method(module, f"{owner}.{name}", *taken.split("|"), optional=optional)
        for name, taken in parameters.items()
    )


def _method(module: str, path: str, *taken: str, optional: str) -> Seam:
    first, *others = (("self", *each.split()) for each in taken)
    return Seam(module, path, first, tuple(others), optional=optional)


def replaced(module: str, owner: str, parameters: dict[str, str]) -> tuple[Seam, ...]:
    """Return the seams of a class in whose place the adapter puts its own, which has no more."""
    own = Seam(module, owner, public=tuple(parameters))
    taken = methods(module, owner, parameters)
    return (own, *(dataclasses.replace(seam, replaced=True) for seam in taken))
