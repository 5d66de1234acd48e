"""What the lines of a module or of a class bind, by their syntax."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

__all__ = ["bound", "called", "is_remade", "lines"]


def lines(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the lines of a body: those of other branches first, so that the first branch wins."""
    first, other = list[ast.stmt](), list[ast.stmt]()
    for line in body:
        if isinstance(line, ast.If):
            checking = "TYPE_CHECKING" in ast.unparse(line.test)
            (first if checking else other).extend(lines(line.orelse))
            first += [] if checking else lines(line.body)
        elif isinstance(line, ast.Try):
            for handler in line.handlers:
                other += lines(handler.body)
            first += lines([*line.body, *line.orelse, *line.finalbody])
        elif isinstance(line, ast.With | ast.For | ast.While):
            first += lines(line.body)
        else:
            first.append(line)
    yield from (*other, *first)


def bound(body: Iterable[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """Yield each name that a body binds, and by which line; that of two which counts comes last."""
    for line in lines(body):
        if isinstance(line, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield line.name, line
        elif isinstance(line, ast.Import | ast.ImportFrom):
            for alias in line.names:
                yield alias.asname or alias.name.split(".")[0], line
        elif isinstance(line, ast.Assign):
            for target in line.targets:
                for part in ast.walk(target):
                    if not isinstance(part, ast.Name) or is_remade(line, part.id):
                        continue
                    if isinstance(part.ctx, ast.Store):
                        yield part.id, line
        elif isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.value:
            yield line.target.id, line


def is_remade(line: ast.Assign, name: str) -> bool:
    """Whether a line puts what a call makes of something in its place."""
    of = {part.id for part in ast.walk(line.value) if isinstance(part, ast.Name)}
    targets = [target.id for target in line.targets if isinstance(target, ast.Name)]
    return isinstance(line.value, ast.Call) and name in targets and name in of


def called(expression: ast.expr) -> str:
    """Return the last name of what is called, or of what is there to be called."""
    whole = expression.func if isinstance(expression, ast.Call) else expression
    return ast.unparse(whole).rpartition(".")[2]
