"""Looks for an engine's seams in its source, a folder or a wheel; nothing of it is imported.

The tables are those of the engine that is installed, and the verdict is the same, but for what
another plugin has changed and for what an import would show (`source_tree`).
"""

from __future__ import annotations

import ast
import importlib.metadata
import lzma
import platform
import struct
import zipfile
import zlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import CodeType

from statecache.engine.seams import Seam, worst_of_each
from statecache.engine.spec import engines
from statecache.engine.views import View, assigned, members_of, probe_views
from statecache.errors import SeamError, SettingsError, escape_control_chars
from statecache.tools.doctor import Finding, Report, judge_engine
from statecache.tools.doctor_child import EngineFound
from statecache.tools.source_tree import Binary, Class, Found, Function, SourceTree

__all__ = ["FLAG", "examine_source", "probe_source"]

FLAG = "--engine-source"
_BELOW = ("", "python", "src")  # where a checkout has its package
_IDENTITY = {"abstractmethod", "final", "override"}  # decorators that return what they are given
_UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)  # as the parser says it
_BROKEN_FILE = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    ValueError,
    OSError,
    EOFError,
    NotImplementedError,
    RuntimeError,
)


def examine_source(path: Path, engine: str | None = None) -> Report:
    """Look at one engine, or at each that is there.

    Raises `SettingsError` where there is none, and for what is neither a folder nor a wheel.
    """
    asked = [spec for spec in engines().values() if engine in (None, spec.name)]
    found: dict[str, EngineFound] = {}
    shown = escape_control_chars(str(path))
    try:
        for spec in asked:
            root = _root(path, spec.name)
            if root is not None:
                states = dict(probe_source(SourceTree(root), spec.seams, spec.views))
                version = _version(path if path.is_file() else Path(str(root)), spec.name)
                found[spec.name] = EngineFound(version, list(spec.tested_versions), states)
    except SettingsError:
        raise
    except _BROKEN_FILE as error:
        raise SettingsError(f"{FLAG}: {shown} cannot be read ({_reason(error)})") from error
    if not found:
        missing = " and no ".join(spec.title for spec in asked)
        raise SettingsError(f"{FLAG}: there is no {missing} in {shown}")
    findings: list[Finding] = []
    for name, looked in found.items():
        findings += judge_engine(engines()[name], looked)
    return Report(
        statecache=importlib.metadata.version("statecache"),
        python=platform.python_version(),
        works=all(finding.level != "problem" for finding in findings),
        findings=findings,
        torch=None,
        engines=found,
    )


def probe_source(
    tree: SourceTree, seams: Sequence[Seam], views: Sequence[View] = ()
) -> list[tuple[str, str]]:
    """Look at every seam and view, as `statecache.engine.seams.probe` does at what is installed."""
    states = [
        (f"{seam.module}.{seam.path}", seam.or_off(_state(tree, seam.target, seam)))
        for seam in seams
    ]
    return worst_of_each([*states, *probe_views(views, lambda view: _missing(tree, view))])


def _state(tree: SourceTree, target: str, seam: Seam) -> str:
    module, _, path = target.partition(":")
    try:
        found, owner = tree.find(module, path)
        if found is None:
            return "missing"
        return seam.judge(_Written(owner, path.rpartition(".")[2], found))
    except _UNREADABLE as error:
        return f"missing ({_reason(error)})"


class _Written:
    """What is known of a thing from its source."""

    def __init__(self, owner: Found | None, name: str, found: Found) -> None:
        self._owner, self._name, self._found = owner, name, found

    def bases(self) -> Collection[str]:
        return self._found.base_names if isinstance(self._found, Class) else ()

    def names(self) -> Collection[str]:
        return self._found.defined if isinstance(self._found, Class) else ()

    def tuple_fields(self) -> tuple[str, ...] | None:
        return self._found.named_fields if isinstance(self._found, Class) else None

    def lacking(self, names: Sequence[str]) -> list[str]:
        return _lacking(self._found, names)

    def names_used(self) -> set[str] | None:
        return {*self._found.code.co_names} if isinstance(self._found, Function) else None

    def parameters(self) -> tuple[str, ...] | None:
        return self._found.parameters if isinstance(self._found, Function | Class) else None

    def annotation(self) -> object:
        if isinstance(self._found, Function):
            return _text(self._found.node.returns)
        for above in self._owner.ancestors if isinstance(self._owner, Class) else ():
            if self._name in above.annotated:
                return _text(above.annotated[self._name].annotation)
        return ""

    def changed_by(self) -> str | None:
        found, owner = self._found, self._owner
        if not isinstance(found, Function):
            return type(found).__name__
        is_own = isinstance(owner, Class) and found.module is owner.module
        if is_own and all(map(self._stays_here, found.decorators)):
            return None
        return f"{found.module.name}.{found.code.co_qualname}"

    def _stays_here(self, decorator: str) -> bool:
        """Whether what this decorator returns was written in the module of the function."""
        if decorator in _IDENTITY or not isinstance(self._found, Function):
            return decorator in _IDENTITY
        made = self._found.module.member(decorator)
        return isinstance(made, Function) and made.module is self._found.module


def _text(annotation: ast.expr | None) -> str:
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return annotation.value  # quoted
    return "" if annotation is None else ast.unparse(annotation)


def _lacking(
    found: Found | None, names: Sequence[str], codes: Sequence[CodeType] = ()
) -> list[str]:
    if isinstance(found, Binary):
        return sorted(name for name in names if found.member(name) is None)
    if not isinstance(found, Class):
        return sorted(names)
    left = {name for name in names if not any(above.lists(name) for above in found.ancestors)}
    for above in found.ancestors:
        for code in above.codes():
            if code.co_argcount:
                left -= assigned(code, left.intersection(code.co_names), code.co_varnames[0])
    for code in codes:
        left -= assigned(code, left.intersection(code.co_names), None)
    return sorted(left)


def _missing(tree: SourceTree, view: View) -> list[str]:
    module, _, path = view.target.partition(":")
    try:
        found, _ = tree.find(module, path)
        if not isinstance(found, Class | Binary):
            raise SeamError(f"{view.target} is missing")
        return _lacking(found, members_of(view.protocol), [*_codes(tree, view.assigned_in)])
    except _UNREADABLE as error:
        raise SeamError(f"{view.target}: {_reason(error)}") from error


def _codes(tree: SourceTree, places: Sequence[str]) -> Iterator[CodeType]:
    for place in places:
        module, _, path = place.partition(":")
        found, _ = tree.find(module, path)
        if found is None:
            raise SeamError(f"{place} is missing")
        if isinstance(found, Function):
            yield found.code


def _reason(error: Exception) -> str:
    return escape_control_chars(str(error)) or type(error).__name__


def _root(path: Path, package: str) -> Path | zipfile.Path | None:
    """Return what has a package in it: in a wheel, a folder, a checkout, or above the package."""
    if path.is_file():
        if not zipfile.is_zipfile(path):
            raise SettingsError(
                f"{FLAG}: {escape_control_chars(str(path))} is no wheel and no folder"
            )
        inside = zipfile.Path(path)
        return inside if (inside / package / "__init__.py").is_file() else None
    if not path.is_dir():
        raise SettingsError(
            f"{FLAG}: there is no folder and no wheel {escape_control_chars(str(path))}"
        )
    if path.name == package and (path / "__init__.py").is_file():
        return path.absolute().parent
    roots = (path / below for below in _BELOW)
    return next((root for root in roots if (root / package / "__init__.py").is_file()), None)


def _version(place: Path, package: str) -> str:
    """Return the version that the metadata beside a package names, without what a build appends."""
    names: dict[str, str] = {}
    own = package.replace("_", "-")
    for distribution in importlib.metadata.distributions(path=[str(place)]):
        said = distribution.metadata
        name, version = (
            said[key] if key in said else ""  # noqa: SIM401 - typed without a `get` in 3.11
            for key in ("Name", "Version")
        )
        name = name.lower().replace("_", "-")
        if version and (name == own or name.startswith(f"{own}-")):
            names[name] = version
    found = names.get(own) or next(iter(names.values()), "unknown")
    return found.partition("+")[0]
