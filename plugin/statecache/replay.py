"""Replay of a recorded workload against a policy: how many tokens a number of slots saves."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

import msgspec

from statecache import CostModel, ReferenceIndex, StateIndex
from statecache.clairvoyant import Foresight
from statecache.errors import SettingsError

if TYPE_CHECKING:
    from statecache.plan import Plan

__all__ = ["POLICIES", "ReplayRow", "directly_below", "play", "replay", "serve"]

POLICIES = ("gds", "lru", "learned", "clairvoyant")


class ReplayRow(msgspec.Struct, frozen=True):
    """Totals of one replay; tokens in whole blocks of 512. Rejected requests count nowhere else."""

    policy: str
    slots: int
    admission: str
    requests: int
    rejected: int
    prompt_tokens: int
    hit_tokens: int
    resident_tokens: int
    missed_by_state_tokens: int
    recompute_cost: float
    evicted_states: int


def replay(plan: Plan, policy: str, slots: int, cost: CostModel | None = None) -> ReplayRow:
    """Serve the plan's requests one after the other with `slots` states at most.

    `policy` is lru, gds or learned (decided by `StateIndex`) or clairvoyant. `cost` decides the
    order of gds and learned and weighs `recompute_cost`.
    """
    cost = cost or CostModel()
    hits, evicted = serve(plan, policy, slots, cost)
    hit_tokens = sum(hits)
    resident_tokens = sum(step.resident_tokens for step in plan.steps)
    return ReplayRow(
        policy=policy,
        slots=slots,
        admission=plan.admission,
        requests=len(plan.steps),
        rejected=plan.rejected,
        prompt_tokens=sum(step.prompt_tokens for step in plan.steps),
        hit_tokens=hit_tokens,
        resident_tokens=resident_tokens,
        missed_by_state_tokens=resident_tokens - hit_tokens,
        recompute_cost=sum(
            cost.cost(hit, step.prompt_tokens) for hit, step in zip(hits, plan.steps, strict=True)
        ),
        evicted_states=evicted,
    )


def serve(plan: Plan, policy: str, slots: int, cost: CostModel) -> tuple[list[int], int]:
    """Return the tokens hit by each step, and the number of states evicted, as `replay` does."""
    if slots < 1:
        raise SettingsError(f"slots is {slots}: give at least 1")
    if policy not in POLICIES:
        raise SettingsError(f"unknown policy {policy!r}: use {', '.join(POLICIES)}")
    if policy == "clairvoyant":
        return Foresight(plan, slots).play()
    return play(plan, StateIndex(policy, cost, slots), slots, learns=policy == "learned")


def play(
    plan: Plan, index: StateIndex | ReferenceIndex, slots: int, *, learns: bool = False
) -> tuple[list[int], int]:
    """Return the tokens hit by each step, and the number of states evicted, as `index` decides.

    An index that `learns` is told of each request's path.
    """
    depths, last = plan.depths, plan.last
    resident = bytearray(len(depths))
    evicted = 0
    hits = []
    for step in plan.steps:
        hit = next(filter(resident.__getitem__, step.resumable), -1)
        if learns:
            path_depths = [depths[c] for c in step.path]
            index.request(step.path, path_depths, len(step.resumable), step.admitted)
        on_path = []  # states of this path that one set now may hang under, deepest last
        if hit >= 0:
            index.touch(hit)
            index.pin(hit)
            on_path.append(hit)
        hits.append(depths[hit] if hit >= 0 else 0)
        if step.dropped:
            index.drop(step.dropped)
            for c in step.dropped:
                resident[c] = 0
        for c in step.admitted[bisect_right(step.admitted, hit) :]:
            if resident[c]:
                index.touch(c, end=c == step.admitted[-1])
                continue
            if len(index) >= slots:
                victims = index.evict(1)
                if not victims:
                    continue
                resident[victims[0]] = 0
                evicted += 1
            while on_path and not resident[on_path[-1]]:
                on_path.pop()
            index.insert(
                c,
                depths[c],
                on_path[-1] if on_path else None,
                directly_below(c, last, resident) if last[c] > c else (),
                end=c == step.admitted[-1],
            )
            resident[c] = 1
            on_path.append(c)
        if hit >= 0:
            index.unpin(hit)
    return hits, evicted


def directly_below(candidate: int, last: list[int], resident: bytearray) -> list[int]:
    """Return the resident states below `candidate` with no other resident one in between.

    Numbers are in preorder: `last[c]` is the highest in the subtree of c.
    """
    end = last[candidate] + 1
    found = []
    below = resident.find(1, candidate + 1, end)
    while below >= 0:
        found.append(below)
        below = resident.find(1, last[below] + 1, end)
    return found
