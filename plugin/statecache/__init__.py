"""Prefix caching for hybrid LLMs: which recurrent state to drop, and how many fit."""

from importlib.metadata import version as _version
from typing import TYPE_CHECKING as _TYPE_CHECKING

from statecache.index.learned_reference import LearnedReference
from statecache.index.reference import ReferenceCost, ReferenceIndex

try:
    from statecache._index import CostModel, StateIndex
except ImportError as _error:
    # Raised where one of them is used: `statecache doctor` must run all the same.
    _problem = (
        "statecache was installed without its native index (statecache._index), or it was built"
        f" for another Python: reinstall it with pip ({_error})"
    )
    if not _TYPE_CHECKING:

        def __getattr__(name: str) -> object:
            if name in ("CostModel", "StateIndex"):
                raise ImportError(_problem, name="statecache._index")
            raise AttributeError(f"module 'statecache' has no attribute '{name}'")


__all__ = [
    "CostModel",
    "LearnedReference",
    "ReferenceCost",
    "ReferenceIndex",
    "StateIndex",
    "__version__",
]

__version__ = _version("statecache")
