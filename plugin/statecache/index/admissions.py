"""The table of admissions: which states are offered for caching, and where each rule can be chosen.

Every list of their names, help text and choice comes from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

__all__ = [
    "ADMISSIONS",
    "POOL",
    "SERVER",
    "SLOTS",
    "AdmissionSpec",
    "admission_names",
    "admission_summaries",
    "current_admission",
    "find_admission",
]

SLOTS = "slots"  # a replay on state slots beside a pool of KV that only evicts by LRU
POOL = "pool"  # a replay on a pool of blocks
SERVER = "server"  # `--statecache-admission` of an engine


@dataclass(frozen=True, kw_only=True)
class AdmissionSpec:
    """A row of the table.

    A state is offered `at_intervals` of so many tokens, `at_branch_points` (where the resident KV
    of a prompt ended) and `at_prompt_end`. `runs_in` says where it can be chosen: `SLOTS`, `POOL`,
    `SERVER`. `old_names` go on working for one release.
    """

    name: str
    summary: str
    runs_in: frozenset[str]
    at_intervals: bool = False
    at_branch_points: bool = False
    at_prompt_end: bool = True
    old_names: tuple[str, ...] = ()


ADMISSIONS: tuple[AdmissionSpec, ...] = (
    AdmissionSpec(
        name="engine",
        summary="where the engine caches states by itself",
        runs_in=frozenset({SERVER}),
    ),
    AdmissionSpec(
        name="branch-points",
        summary="where the resident KV of a prompt ended, and at the prompt's end",
        runs_in=frozenset({POOL, SERVER}),
        at_branch_points=True,
        old_names=("junctions", "ends+fork"),
    ),
    AdmissionSpec(
        name="dense",
        summary="every interval, and at the prompt's end (in a server at branch points too)",
        runs_in=frozenset({SLOTS, POOL, SERVER}),
        at_intervals=True,
    ),
    AdmissionSpec(
        name="dense+branch-points",
        summary="every interval, at branch points, and at the prompt's end",
        runs_in=frozenset({POOL}),
        at_intervals=True,
        at_branch_points=True,
        old_names=("dense+junctions",),
    ),
    AdmissionSpec(
        name="ends",
        summary="at the prompt's end alone",
        runs_in=frozenset({SLOTS, POOL}),
    ),
    AdmissionSpec(
        name="aligned",
        summary="at the last whole interval of the prompt alone",
        runs_in=frozenset({SLOTS}),
        at_intervals=True,
        at_prompt_end=False,
    ),
)


def admission_names(place: str) -> tuple[str, ...]:
    """Return the admissions that can be chosen in `place`, in table order."""
    return tuple(spec.name for spec in ADMISSIONS if place in spec.runs_in)


def admission_summaries(place: str) -> str:
    """Return each admission of `place` with its summary, as a help text shows them."""
    return "; ".join(f"{spec.name}: {spec.summary}" for spec in ADMISSIONS if place in spec.runs_in)


def current_admission(name: str) -> str:
    """Return today's name of an admission; a name that is none as it is."""
    return next((spec.name for spec in ADMISSIONS if name in spec.old_names), name)


@cache
def find_admission(name: str, place: str) -> AdmissionSpec:
    """Return the row of a name of today or before; raise `ValueError` with those of `place`."""
    current = current_admission(name)
    for spec in ADMISSIONS:
        if spec.name == current and place in spec.runs_in:
            return spec
    raise ValueError(f"unknown admission {name!r}: use {', '.join(admission_names(place))}")
