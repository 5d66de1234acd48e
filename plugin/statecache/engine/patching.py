"""Changes of an engine: each a row with its reason, all of them installed or none.

A row (`Patch`) says what is changed, why, and when the change can go. It is a constant in the
adapter's table; where it is installed it gets what does it:

    patches = PatchSet([
        ADD_ONE_REQ.wrapped_by(admit_all_or_none),       # (original, owner, *arguments)
        TOUCH.on(pool).replaced_by(touch),               # an attribute of one object
        TREE_CORE.carried_out_by(register, unregister),  # what is no attribute
    ])
    patches.install()
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from statecache.errors import SeamError

__all__ = [
    "Patch",
    "PatchSet",
    "bind_dynamically",
    "detect_overrides",
    "original_function",
    "resolve",
]

_MARK = "_statecache_patch"
_ABSENT = object()


@dataclasses.dataclass(frozen=True)
class Patch:
    """One change of an engine. `target` is "module:attribute" or "module:Class.attribute".

    `why` says what is wrong without it, `upstream` names the engine's functions or changes it
    concerns, `remove_when` what must be true before it can go.
    """

    target: str
    why: str
    upstream: str = ""
    remove_when: str = ""
    around: Callable[..., Any] | None = None
    replacement: Any = _ABSENT
    carried_out: tuple[Callable[[], object], Callable[[], object] | None] | None = None
    object_: Any = None

    def wrapped_by(self, around: Callable[..., Any]) -> Patch:
        """Return the row with `around(original, *arguments)` called in place of the target.

        A method's arguments begin with its object, a class method's with the class. For a row that
        is `on` an object, `original` is bound to it, and the arguments are those of the caller.
        """
        return dataclasses.replace(self, around=around)

    def replaced_by(self, replacement: Any) -> Patch:
        """Return the row with `replacement` put where the target is, as it is."""
        return dataclasses.replace(self, replacement=replacement)

    def carried_out_by(
        self, install: Callable[[], object], remove: Callable[[], object] | None = None
    ) -> Patch:
        """Return the row with the functions that do it and, where that can be, take it back."""
        return dataclasses.replace(self, carried_out=(install, remove))

    def on(self, owner: Any) -> Patch:
        """Return the row for one object of the class that the target names."""
        return dataclasses.replace(self, object_=owner)

    @property
    def name(self) -> str:
        """The attribute that is changed."""
        return self.target.rpartition(":")[2].rpartition(".")[2]

    def owner(self) -> Any:
        """Return what has the attribute: the object, else a class or a module.

        Raises `SeamError` where there is none.
        """
        return resolve(self.target)[0] if self.object_ is None else self.object_


class PatchSet:
    """Some changes that are made together. What another plugin puts around one of them stays.

    After `remove` nothing of ours is done any more, not inside another plugin's wrapper either.
    """

    def __init__(self, patches: Sequence[Patch]) -> None:
        self.patches = tuple(patches)
        self._installed: list[_Installed] | None = None

    @property
    def installed(self) -> bool:
        """Whether the changes are in place."""
        return self._installed is not None

    def install(self) -> None:
        """Make all changes, or none: what fails is raised with those before it taken back.

        Does nothing when they are in place. Raises `SeamError` for a target that another set of
        ours holds, or that is not there.
        """
        if self._installed is not None:
            return
        done: list[_Installed] = []
        with contextlib.ExitStack() as undo:
            for patch in self.patches:
                installed = _Installed(patch)
                undo.callback(installed.remove)
                done.append(installed)
            undo.pop_all()
        self._installed = done

    def remove(self) -> None:
        """Take the changes back, the last one first."""
        done, self._installed = self._installed or [], None
        for installed in reversed(done):
            installed.remove()


class _Installed:
    """One change that was made."""

    def __init__(self, patch: Patch) -> None:
        self._patch = patch
        self.live = True
        if patch.carried_out is not None:
            patch.carried_out[0]()
            return
        self._owner, self._name = patch.owner(), patch.name
        self._found = self._look()
        if self._is_own and _is_held(self._found):
            raise SeamError(f"{patch.target} is patched by statecache already")
        if patch.around is not None:
            self._put = self._wrapper(patch.around)
        elif patch.replacement is not _ABSENT:
            self._put = patch.replacement
        else:
            raise TypeError(f"{patch.target}: nothing was given to put in its place")
        with contextlib.suppress(AttributeError, TypeError):  # what takes no attributes
            setattr(_function_of(self._put), _MARK, self)
        setattr(self._owner, self._name, self._put)

    def _look(self) -> Any:
        """Return what is there as it is written, and note whether it is the owner's own.

        What an object has is not looked up in its `__dict__`: once Python has made one, every use
        of its attributes is slower.
        """
        owner, name = self._owner, self._name
        if self._patch.object_ is None:
            found = inspect.getattr_static(owner, name, _ABSENT)
            self._is_own = name in vars(owner)
        else:
            found = getattr(owner, name, _ABSENT)
            self._is_own = not _is_of_class(owner, name, found)
        if found is _ABSENT:
            raise SeamError(f"{self._patch.target} is missing")
        return found

    def _wrapper(self, around: Callable[..., Any]) -> Any:
        found, on_object = self._found, self._patch.object_ is not None
        original = bind_dynamically(self._owner, self._name) if on_object else _function_of(found)
        is_class = inspect.isclass(original)

        @functools.wraps(original, updated=() if is_class else functools.WRAPPER_UPDATES)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not self.live:
                return original(*args, **kwargs)
            return around(original, *args, **kwargs)

        if on_object or not inspect.isclass(self._owner):
            return wrapper
        if isinstance(found, classmethod):
            return classmethod(wrapper)
        # A class that is an attribute of a class is called without an object, too.
        return staticmethod(wrapper) if is_class or isinstance(found, staticmethod) else wrapper

    def remove(self) -> None:
        """Take it back, unless another plugin has put something else there."""
        if not self.live:
            return
        self.live = False
        if self._patch.carried_out is not None:
            take_back = self._patch.carried_out[1]
            if take_back is not None:
                take_back()
            return
        look = getattr if self._patch.object_ is not None else inspect.getattr_static
        if look(self._owner, self._name, None) is not self._put:
            return
        if self._is_own:
            setattr(self._owner, self._name, self._found)
        else:
            delattr(self._owner, self._name)


def resolve(target: str) -> tuple[Any, str]:
    """Return what has the attribute that `target` names, and the attribute's name.

    Raises `SeamError` where the module or a class on the way is not there.
    """
    module, _, path = target.partition(":")
    *classes, name = path.split(".")
    try:
        owner: Any = importlib.import_module(module)
        for part in classes:
            owner = getattr(owner, part)
    except (ImportError, AttributeError) as error:
        raise SeamError(f"{target} is missing ({error})") from error
    return owner, name


def bind_dynamically(owner: Any, name: str) -> Callable[..., Any]:
    """Return the method `name` of an object as it is at each call.

    What other plugins put on its class later is called, too. A method that the object itself was
    given is returned as it is.
    """
    found = getattr(owner, name)
    if not _is_of_class(owner, name, found):
        return found  # type: ignore[no-any-return]
    base = type(owner)

    @functools.wraps(found)
    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(base, name)(owner, *args, **kwargs)

    return call


def original_function(owner: Any, name: str) -> Any:
    """Return the function `name` of a class, None if it comes from anywhere but its module."""
    found = inspect.getattr_static(owner, name, None)
    module = vars(sys.modules[owner.__module__])
    return found if getattr(found, "__globals__", None) is module else None


def detect_overrides(targets: Iterable[str]) -> Callable[[], str | None]:
    """Return what names the first of these methods that another plugin has overridden since.

    It returns "Class.method", None while all of them are the engine's own.
    """
    functions = []
    for target in targets:
        owner, name = resolve(target)
        functions.append((owner, name, original_function(owner, name)))

    def overridden() -> str | None:
        for owner, name, function in functions:
            if owner.__dict__.get(name) is not function:
                return f"{owner.__name__}.{name}"
        return None

    return overridden


def _is_of_class(owner: Any, name: str, found: Any) -> bool:
    """Whether `found`, an attribute of this object, is a method of its class."""
    return found is not _ABSENT and getattr(found, "__func__", None) is getattr(
        type(owner), name, _ABSENT
    )


def _function_of(found: Any) -> Any:
    return found.__func__ if isinstance(found, staticmethod | classmethod) else found


def _is_held(found: Any) -> bool:
    """Whether a change that is in place is somewhere in this chain of wrappers."""
    function = _function_of(found)
    while function is not None:
        mark = getattr(function, _MARK, None)
        if isinstance(mark, _Installed) and mark.live:
            return True
        function = getattr(function, "__wrapped__", None)
    return False
