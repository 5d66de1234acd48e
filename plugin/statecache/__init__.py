"""Prefix caching for hybrid LLMs: which recurrent state to drop, and how many fit."""

from importlib.metadata import version as _version

from statecache.learned_reference import LearnedReference
from statecache.reference import ReferenceCost, ReferenceIndex

try:
    from statecache._index import CostModel, StateIndex
except ImportError as _error:
    raise ImportError(
        "statecache was installed without its native index (statecache._index), or it was built"
        f" for another Python: reinstall it with pip ({_error})"
    ) from _error

__all__ = [
    "CostModel",
    "LearnedReference",
    "ReferenceCost",
    "ReferenceIndex",
    "StateIndex",
    "__version__",
]

__version__ = _version("statecache")
