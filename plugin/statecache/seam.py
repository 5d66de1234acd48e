"""A seam: one thing of an engine that an adapter uses, to check against what is installed.

Nothing of the engine is imported before a seam is looked at.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any

__all__ = ["Seam", "methods"]


@dataclasses.dataclass(frozen=True)
class Seam:
    """One thing of an engine that is used, and what must hold for it."""

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


def methods(module: str, owner: str, parameters: dict[str, str]) -> tuple[Seam, ...]:
    """Return the seams of some methods of a class, by name and what they take after `self`."""
    return tuple(
        Seam(module, f"{owner}.{name}", ("self", *taken.split()))
        for name, taken in parameters.items()
    )
