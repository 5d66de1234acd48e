"""What is read of an engine's objects: a `Protocol` for each class, checked against that class.

Nothing is an instance of these protocols at run time. They are the types the adapter is checked
with, and `probe_views` finds an attribute that an engine has renamed before a request fails on it.
"""

from __future__ import annotations

import dataclasses
import dis
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from types import CodeType
from typing import Any, Protocol

from statecache.engine.patching import resolve
from statecache.errors import SeamError

__all__ = [
    "OURS",
    "View",
    "assigned",
    "is_listed",
    "lacking",
    "members_of",
    "off",
    "probe_views",
    "what_is_off",
]

OURS = "statecache_"  # begins the names that an adapter itself puts on an engine's object
# Where a class lists what its objects have.
_LISTS = (
    "__annotations__",
    "__slots__",
    "__dataclass_fields__",
    "__struct_fields__",
    "__pydantic_fields__",
    "_fields",
)


@dataclasses.dataclass(frozen=True)
class View:
    """A protocol and the class of the engine, "module:Class", that has all of its members.

    An attribute counts where the class or one of its bases defines or lists it, or assigns it to
    its own object in a method. `assigned_in` names further functions of the engine, "module:Class.
    method", that put attributes on such an object. With `optional`, the name of a feature, only
    that feature is off where a member is missing.
    """

    protocol: type
    target: str
    assigned_in: tuple[str, ...] = ()
    optional: str = ""

    def missing(self) -> list[str]:
        """Return the members that the class does not have. Raises `SeamError` without the class."""
        owner, name = resolve(self.target)
        found = getattr(owner, name, None)
        if not inspect.isclass(found):
            raise SeamError(f"{self.target} is missing")
        return lacking(found, members_of(self.protocol), self.assigned_in)


def lacking(owner: type, names: Iterable[str], assigned_in: tuple[str, ...] = ()) -> list[str]:
    """Return those of the names that no object of a class has, as `View` says."""
    bases = owner.__mro__[:-1]
    left = {name for name in names if not is_listed(name, bases)}
    for code, own in _codes(bases, assigned_in):
        left -= assigned(code, left.intersection(code.co_names), own)
        if not left:
            break
    return sorted(left)


def _codes(
    bases: Iterable[type], assigned_in: Iterable[str]
) -> Iterator[tuple[CodeType, str | None]]:
    """Yield each code that may assign attributes, and what it calls its own object."""
    for base in bases:
        for value in vars(base).values():
            for code in _codes_of(value):
                if code.co_argcount:
                    yield code, code.co_varnames[0]
    for place in assigned_in:
        owner, name = resolve(place)
        for code in _codes_of(inspect.getattr_static(owner, name, None)):
            yield code, None


def members_of(protocol: type) -> list[str]:
    """Return the names of what a protocol's objects have, but for those that are `OURS`."""
    found: dict[str, None] = {}
    for base in protocol.__mro__:
        if base in (object, Protocol) or not getattr(base, "_is_protocol", False):
            continue
        own = [name for name, value in vars(base).items() if _is_member(name, value)]
        found |= dict.fromkeys([*vars(base).get("__annotations__", {}), *own])
    return [name for name in found if not name.startswith(OURS)]


def _is_member(name: str, value: object) -> bool:
    if name.startswith("__"):  # of these a class has most by itself
        return name in ("__len__", "__getitem__", "__iter__", "__contains__", "__call__", "__int__")
    return not name.startswith("_abc_") and (
        inspect.isfunction(value) or isinstance(value, property | staticmethod | classmethod)
    )


def is_listed(name: str, bases: Iterable[type]) -> bool:
    """Whether one of these classes defines or lists an attribute."""
    return any(
        name in vars(base) or any(name in _list_of(base, attribute) for attribute in _LISTS)
        for base in bases
    )


def _list_of(base: type, attribute: str) -> Collection[str]:
    """Return a list of names of a class; none where its metaclass has a descriptor in its place."""
    found = vars(base).get(attribute)
    return found if isinstance(found, Collection) else ()


def _codes_of(value: Any) -> Iterator[CodeType]:
    parts = [value.fget, value.fset] if isinstance(value, property) else [value]
    for part in parts:
        function = part.__func__ if isinstance(part, staticmethod | classmethod) else part
        code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
        if isinstance(code, CodeType):
            yield code


def assigned(code: CodeType, names: Iterable[str], own: str | None) -> set[str]:
    """Return those of the names that the code assigns as attributes, of `own` or of anything."""
    wanted, found = set(names), set[str]()
    if not wanted:
        return found
    before: Any = None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "STORE_ATTR" and instruction.argval in wanted:
            loaded = before[-1] if isinstance(before, tuple) else before
            if own is None or loaded == own:
                found.add(instruction.argval)
        before = instruction.argval
    return found


def probe_views(
    views: Sequence[View], missing: Callable[[View], list[str]] = View.missing
) -> list[tuple[str, str]]:
    """Return each attribute that is read, by its place, and "ok", "missing" or "off ...".

    `missing` returns the members that a view's class has not, or raises `SeamError`.
    """
    states: dict[str, str] = {}
    for view in views:
        place = view.target.replace(":", ".")
        gone = off(view.optional, "missing") if view.optional else "missing"
        try:
            without = missing(view)
        except SeamError:
            if states.get(place) != "missing":
                states[place] = gone
            continue
        for member in members_of(view.protocol):
            name = f"{place}.{member}"
            if states.get(name) != "missing":
                states[name] = gone if member in without else "ok"
    return list(states.items())


def off(feature: str, reason: str) -> str:
    """Return the state of something that is not in place and that only `feature` needs."""
    return f"off: {feature}: {reason}"


def what_is_off(state: str) -> tuple[str, str] | None:
    """Return the feature and the reason of such a state, None for any other."""
    kind, _, rest = state.partition(": ")
    if kind != "off":
        return None
    feature, _, reason = rest.partition(": ")
    return feature, reason
