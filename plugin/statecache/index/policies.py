"""The table of eviction policies: a new one is a file of its own and a row here.

Every list of policy names, help text, default colour and choice comes from it. The native index is
imported where one is made: without it a server must still start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from statecache.index.learned_reference import LearnedReference
from statecache.index.reference import ReferenceCost, ReferenceIndex
from statecache.index.tips_reference import TipsReference

if TYPE_CHECKING:
    from statecache._index import CostModel
    from statecache.index.interface import EvictionIndex

__all__ = [
    "BASELINE",
    "DEFAULT",
    "ENGINE",
    "GHOSTS",
    "POLICIES",
    "REPLAY",
    "DEFAULT_WITHOUT_PROMPTS",
    "PolicySpec",
    "find_policy",
    "make_index",
    "pool_policy_names",
    "policy_names",
    "summaries",
]

DEFAULT = "learned"  # wherever an engine's states have slots
DEFAULT_WITHOUT_PROMPTS = "gds"  # where it cannot run: nothing tells of prompts
BASELINE = "lru"  # what others are compared with
GHOSTS = 4096  # evicted states that are remembered
ENGINE = "engine"  # `--statecache-policy` of an engine, its dry run, and its arms of `ab`
REPLAY = "replay"  # `statecache replay` on state slots, and the arms of `ab` that replay


@dataclass(frozen=True, kw_only=True)
class PolicySpec:
    """A row of the table.

    `summary` says in half a sentence which state goes first. `native(cost, slots, ghosts)` makes an
    empty index for a cache of `slots` states that remembers `ghosts` evicted ones, `reference` the
    plain form that it is tested against. `runs_in` says where the policy can be chosen: `ENGINE`,
    `REPLAY`. A policy that `needs_prompts` has to be told of each prompt, and of states by the keys
    of their prefixes. One that has to know what comes later has no index: the replay plays it on
    the whole schedule.
    """

    name: str
    summary: str
    native: Callable[[CostModel, int | None, int], EvictionIndex] | None
    reference: Callable[[ReferenceCost, int | None, int], EvictionIndex] | None
    runs_in: frozenset[str]
    needs_prompts: bool = False


def _native(name: str) -> Callable[[CostModel, int | None, int], EvictionIndex]:
    def make(cost: CostModel, slots: int | None, ghosts: int) -> EvictionIndex:
        from statecache import StateIndex

        return StateIndex(name, cost, slots, ghosts)

    return make


POLICIES: tuple[PolicySpec, ...] = (
    PolicySpec(
        name="lru",
        summary="the least recently used",
        native=_native("lru"),
        reference=lambda cost, _slots, _ghosts: ReferenceIndex("lru", cost),
        runs_in=frozenset({ENGINE, REPLAY}),
    ),
    PolicySpec(
        name="gds",
        summary="GreedyDual-Size: the cheapest to compute again, aged by what was evicted since",
        native=_native("gds"),
        reference=lambda cost, _slots, _ghosts: ReferenceIndex("gds", cost),
        runs_in=frozenset({ENGINE, REPLAY}),
    ),
    PolicySpec(
        name="learned",
        summary="the least likely to be resumed for its cost, learnt from the prompts seen",
        native=_native("learned"),
        reference=LearnedReference,
        runs_in=frozenset({ENGINE, REPLAY}),
        needs_prompts=True,
    ),
    PolicySpec(
        name="gds-tips",
        summary="as gds, but the middle of a path before tips and forks, and gains count less",
        native=_native("gds-tips"),
        reference=lambda cost, _slots, _ghosts: TipsReference(cost),
        runs_in=frozenset({ENGINE, REPLAY}),
    ),
    PolicySpec(
        name="clairvoyant",
        summary="the one that saves least, knowing every later request: for comparison",
        native=None,
        reference=None,
        runs_in=frozenset({REPLAY}),
    ),
)


def policy_names(place: str) -> tuple[str, ...]:
    """Return the policies that can be chosen in `place`, `ENGINE` or `REPLAY`, in table order."""
    return tuple(spec.name for spec in POLICIES if place in spec.runs_in)


def pool_policy_names() -> tuple[str, ...]:
    """Return the policies of a replay whose states have slots beside a pool of KV blocks.

    That replay tells nothing of prompts, and nothing of what comes later.
    """
    return tuple(
        spec.name
        for spec in POLICIES
        if REPLAY in spec.runs_in and spec.native is not None and not spec.needs_prompts
    )


def find_policy(name: str) -> PolicySpec:
    """Return the row of this name; raise `ValueError` with the names of the table."""
    for spec in POLICIES:
        if spec.name == name:
            return spec
    raise ValueError(f"unknown policy {name!r}: use {', '.join(spec.name for spec in POLICIES)}")


def make_index(
    name: str, cost: CostModel, slots: int | None = None, ghosts: int = GHOSTS
) -> EvictionIndex:
    """Return an empty index of the policy of this name, for a cache of `slots` states.

    Raises `ValueError` for a name that the table has not, or has without an index.
    """
    make = find_policy(name).native
    if make is None:
        raise ValueError(f"the policy {name} knows what comes later: it runs in a replay alone")
    return make(cost, slots, ghosts)


def summaries(place: str) -> str:
    """Return each policy of `place` with its summary, as a help text shows them."""
    return "; ".join(f"{spec.name}: {spec.summary}" for spec in POLICIES if place in spec.runs_in)
