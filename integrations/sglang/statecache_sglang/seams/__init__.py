"""What statecache takes from SGLang: the only files that import anything of it.

(`bench` too, which builds a cache without a server.) SGLang is imported inside the functions:
loading the plugin must not load the engine.
"""

from __future__ import annotations

import functools
import importlib
from importlib.metadata import version
from typing import Any

__all__ = ["engine_version", "load"]


@functools.cache
def load(name: str) -> Any:
    """Import a module of SGLang."""
    return importlib.import_module(name)


def engine_version() -> str:
    """Return the version of SGLang that is installed."""
    return version("sglang")
