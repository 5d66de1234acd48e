"""What the source of a package defines, read without importing it: a folder or a wheel.

A name is followed as Python would: through `import`, aliases and base classes, within the package.
What a condition or a failed import decides at run time is not known here: each branch counts, the
first one first, but never what stands under `if TYPE_CHECKING`. Of a compiled module only the names
in it are known.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

from statecache.tools.source_lines import bound, called, is_remade, lines

__all__ = ["Binary", "Class", "Function", "Module", "SourceTree", "Value"]

_MOST_ALIASES = 32  # one after the other, before they are taken for a circle


@dataclasses.dataclass(frozen=True)
class Value:
    """Something that is there, of which no more is known."""

    module: Module


@dataclasses.dataclass(frozen=True)
class Binary:
    """A compiled module, or something in it."""

    content: bytes

    def member(self, name: str) -> Binary | None:
        """Return what is called `name`, if anything is."""
        return self if name.encode() in self.content else None


@dataclasses.dataclass(frozen=True)
class Function:
    """A function, with the code it compiles to."""

    module: Module
    node: ast.FunctionDef | ast.AsyncFunctionDef
    code: CodeType

    @property
    def decorators(self) -> list[str]:
        """What is called with it, without arguments and without what is before the last dot."""
        return [called(decorator) for decorator in self.node.decorator_list]

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of its parameters, as `inspect.signature` has them."""
        code, names = self.code, list(self.code.co_varnames)
        plain = code.co_argcount + code.co_kwonlyargcount
        star = [names[plain]] if code.co_flags & inspect.CO_VARARGS else []
        stars = names[plain + len(star) : plain + len(star) + 1]
        keywords = stars if code.co_flags & inspect.CO_VARKEYWORDS else []
        return (*names[: code.co_argcount], *star, *names[code.co_argcount : plain], *keywords)


@dataclasses.dataclass(frozen=True, eq=False)
class Class:
    """A class."""

    module: Module
    node: ast.ClassDef

    @functools.cached_property
    def names(self) -> dict[str, ast.AST]:
        """What its own body binds, by name."""
        return dict(bound(self.node.body))

    @functools.cached_property
    def annotated(self) -> dict[str, ast.AnnAssign]:
        """Its own annotations, `ClassVar` among them."""
        given = [line for line in self.node.body if isinstance(line, ast.AnnAssign)]
        return {line.target.id: line for line in given if isinstance(line.target, ast.Name)}

    @functools.cached_property
    def bases(self) -> list[Class | str]:
        """The classes it is made from; of those of other packages the name."""
        found: list[Class | str] = []
        for base in self.node.bases:
            plain = base.value if isinstance(base, ast.Subscript) else base
            there = self.module.evaluate(plain)
            found.append(there if isinstance(there, Class) else called(plain))
        return found

    @functools.cached_property
    def ancestors(self) -> list[Class]:
        """It and the classes of the package it comes from, in the order they are searched."""
        found: dict[Class, None] = {self: None}
        for base in self.bases:
            if isinstance(base, Class):
                for above in base.ancestors:  # a common one is searched where it comes last
                    found.pop(above, None)
                    found[above] = None
        return list(found)

    @property
    def base_names(self) -> set[str]:
        """The names of all classes that it comes from."""
        names = {
            base if isinstance(base, str) else base.node.name
            for above in self.ancestors
            for base in above.bases
        }
        return names | {"object"}

    @property
    def is_record(self) -> bool:
        """Whether its annotations are fields: a dataclass, a named tuple or a msgspec struct."""
        made = {called(decorator) for decorator in self.node.decorator_list}
        return bool(made & {"dataclass"} or self.base_names & {"NamedTuple", "Struct"})

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the fields of a record, those of its bases first."""
        found: dict[str, None] = {}
        for above in reversed(self.ancestors):
            if above.is_record or self.base_names & {"Struct"}:
                found |= dict.fromkeys(
                    name
                    for name, line in above.annotated.items()
                    if "ClassVar" not in ast.unparse(line.annotation)
                )
        return tuple(found)

    @property
    def parameters(self) -> tuple[str, ...] | None:
        """What it is called with; None where that is not known."""
        for above in self.ancestors:
            for name in ("__init__", "__new__"):
                own = above.own(name)
                if isinstance(own, Function):
                    return own.parameters[1:]
            if above.is_record:
                return _given(self)
        return None

    def own(self, name: str) -> Found | None:
        """Return what its own body says `name` is."""
        node = self.names.get(name)
        if node is None:
            return None
        return self.module.definition(node, self)

    def member(self, name: str) -> Found | None:
        """Return the attribute `name` of the class, its own or of a base."""
        for above in self.ancestors:
            found = above.own(name)
            if found is not None:
                return found
            if above.lists(name):
                return Value(above.module)
        return None

    def lists(self, name: str) -> bool:
        """Whether its own body says that its objects have `name`.

        One that a call makes anew has what the classes list that its module imports, too.
        """
        if name in self.names or name in self.annotated or name in self.slots:
            return True
        return any(field_of.lists(name) for field_of in self._ingredients)

    @functools.cached_property
    def _ingredients(self) -> list[Class]:
        return self.module.imported_classes() if self.module.remakes(self.node.name) else []

    @property
    def defined(self) -> set[str]:
        """What is in its own `__dict__`, as far as its body says."""
        made = {
            ast.unparse(each) for each in self.node.decorator_list if called(each) == "dataclass"
        }
        listed = any("slots=True" in each for each in made) or (not made and self.is_record)
        left = {name for name, line in self.annotated.items() if _has_factory(line)}
        return {*self.names} - left | self.slots | ({*self.annotated} if listed else set())

    @property
    def named_fields(self) -> tuple[str, ...] | None:
        """The fields of a named tuple, None of any other class."""
        return self.fields if "NamedTuple" in self.base_names else None

    @functools.cached_property
    def slots(self) -> set[str]:
        """The names in its own `__slots__`, as far as they are written down."""
        node = self.names.get("__slots__")
        value = node.value if isinstance(node, ast.Assign) else None
        try:
            given = ast.literal_eval(value) if value is not None else ()
        except ValueError:
            return set()
        return {given} if isinstance(given, str) else {*given}

    def codes(self) -> Iterator[CodeType]:
        """Yield the code of each function of its own body."""
        for line in lines(self.node.body):
            if isinstance(line, ast.FunctionDef | ast.AsyncFunctionDef):
                yield self.module.code(line)


class Module:
    """A module in Python."""

    def __init__(self, tree: SourceTree, name: str, text: str, *, is_package: bool) -> None:
        self._tree = tree
        self.name = name
        self._package = name if is_package else name.rpartition(".")[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._parsed = ast.parse(text)
            self._code = compile(self._parsed, name, "exec", dont_inherit=True)

    @functools.cached_property
    def _names(self) -> dict[str, ast.AST]:
        return dict(bound(self._parsed.body))

    @functools.cached_property
    def _codes(self) -> dict[tuple[str, int], CodeType]:
        found, left = {}, [self._code]
        while left:
            for code in left.pop().co_consts:
                if isinstance(code, CodeType):
                    found[code.co_name, code.co_firstlineno] = code
                    left.append(code)
        return found

    def remakes(self, name: str) -> bool:
        """Whether a class of the module is made anew by a call, as `defstruct` does."""
        made = [line for line in self._parsed.body if isinstance(line, ast.Assign)]
        return any(is_remade(line, name) for line in made)

    def imported_classes(self) -> list[Class]:
        """Return the classes that the module imports by name."""
        taken = [line for line in self._parsed.body if isinstance(line, ast.ImportFrom)]
        names = [alias.asname or alias.name for line in taken for alias in line.names]
        return [found for found in map(self.member, names) if isinstance(found, Class)]

    def code(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> CodeType:
        """Return what a function of this module compiles to."""
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        return self._codes[node.name, first]

    def member(self, name: str, depth: int = 0) -> Found | None:
        """Return what the module has under `name`: its own, imported, or a module below it."""
        if depth > _MOST_ALIASES:
            return None
        node = self._names.get(name)
        if node is not None:
            return self.definition(node, None, name, depth)
        below = self._tree.module(f"{self.name}.{name}")
        if below is not None:
            return below
        for line in lines(self._parsed.body):
            if isinstance(line, ast.ImportFrom) and line.names[0].name == "*":
                source = self._tree.module(self._absolute(line))
                found = source.member(name, depth + 1) if isinstance(source, Module) else None
                if found is not None:
                    return found
        return None

    def definition(
        self, node: ast.AST, owner: Class | None, name: str = "", depth: int = 0
    ) -> Found:
        """Return what a line of this module binds, within the class `owner` if that is given."""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return Function(self, node, self.code(node))
        if isinstance(node, ast.ClassDef):
            return self._class(node)
        if isinstance(node, ast.Import | ast.ImportFrom):
            return self._imported(node, name, depth) or Value(self)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name | ast.Attribute):
            inner = node.value.id if isinstance(node.value, ast.Name) else ""
            if owner is not None and inner in owner.names and owner.names[inner] is not node:
                return self.definition(owner.names[inner], owner, inner, depth + 1)
            return self.evaluate(node.value, depth + 1) or Value(self)
        return Value(self)

    @functools.cache  # noqa: B019 - a module lives as long as its tree
    def _class(self, node: ast.ClassDef) -> Class:
        return Class(self, node)

    def _absolute(self, line: ast.ImportFrom) -> str:
        above = self._package.split(".")
        parts = above[: len(above) - line.level + 1] if line.level else []
        return ".".join([*parts, *([line.module] if line.module else [])])

    def _imported(self, line: ast.Import | ast.ImportFrom, name: str, depth: int) -> Found | None:
        for alias in line.names:
            if (alias.asname or alias.name.split(".")[0]) != name:
                continue
            if isinstance(line, ast.Import):
                whole = alias.name if alias.asname else alias.name.split(".")[0]
                return self._tree.module(whole)
            source = self._tree.module(self._absolute(line))
            return _member(source, alias.name, depth + 1)
        return None

    def evaluate(self, expression: ast.expr, depth: int = 0) -> Found | None:
        """Return what a name with dots means in this module, None where that is not known."""
        if isinstance(expression, ast.Name):
            return self.member(expression.id, depth)
        if isinstance(expression, ast.Attribute):
            return _member(self.evaluate(expression.value, depth), expression.attr, depth + 1)
        return None


Found = Module | Class | Function | Binary | Value


class SourceTree:
    """The modules below a folder, or in a wheel, that has packages in it."""

    def __init__(self, root: Path | zipfile.Path) -> None:
        self.root: Any = root

    @functools.cache  # noqa: B019 - one tree at a time
    def module(self, name: str) -> Module | Binary | None:
        """Return the module `name`. Raises `SyntaxError` for one this Python cannot read."""
        *above, last = name.split(".")
        folder = self.root.joinpath(*above) if above else self.root
        for file, is_package in ((folder / last / "__init__.py", True), (folder / f"{last}.py", 0)):
            if file.is_file():
                text = file.read_text(encoding="utf-8", errors="replace")
                return Module(self, name, text, is_package=bool(is_package))
        if not folder.is_dir():
            return None
        for file in folder.iterdir():
            if file.name.startswith(f"{last}.") and file.name.endswith((".so", ".pyd")):
                return Binary(file.read_bytes())
        return None

    def find(self, module: str, path: str) -> tuple[Found | None, Found | None]:
        """Return what is at "Class.attribute" of a module, and what has it; None where nothing is.

        Raises `SyntaxError` for a module this Python cannot read.
        """
        owner: Found | None = None
        found: Found | None = self.module(module)
        for name in path.split("."):
            owner, found = found, _member(found, name, 0)
        return found, owner


def _member(found: Found | None, name: str, depth: int) -> Found | None:
    if isinstance(found, Module):
        return found.member(name, depth)
    return found.member(name) if isinstance(found, Class | Binary) else None


def _has_factory(line: ast.AnnAssign) -> bool:
    return line.value is not None and "default_factory" in ast.unparse(line.value)


def _given(record: Class) -> tuple[str, ...]:
    """Return the fields that a record is called with, those given by keyword alone last."""
    plain, by_keyword = list[str](), list[str]()
    for name in record.fields:
        for above in record.ancestors:
            line = above.annotated.get(name)
            if line is not None:
                value = "" if line.value is None else ast.unparse(line.value)
                made = " ".join(map(ast.unparse, above.node.decorator_list))
                if "init=False" in value:
                    break
                is_keyword = "kw_only=True" in f"{value} {made}"
                (by_keyword if is_keyword else plain).append(name)
                break
    return (*plain, *by_keyword)
