"""Replay of a recorded workload against a policy: how many tokens a number of slots saves."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Protocol

import msgspec

from statecache import CostModel
from statecache.errors import SettingsError
from statecache.index.policies import REPLAY, find_policy, make_index, policy_names
from statecache.replay.clairvoyant import ClairvoyantPolicy
from statecache.replay.prefix_tree import directly_below

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from statecache.index.interface import EvictionIndex
    from statecache.replay.schedule import ReplaySchedule, ScheduledRequest

__all__ = ["ReplayRow", "SlotSimulator", "Totals", "play", "replay", "serve"]


class _ByCandidate(Protocol):
    def __getitem__(self, candidate: int, /) -> int: ...


class _Flags(_ByCandidate, Protocol):
    def __setitem__(self, candidate: int, flag: int, /) -> None: ...


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of one replay; tokens in whole blocks of 512. Rejected requests count nowhere else."""

    requests: int
    rejected: int
    prompt_tokens: int
    hit_tokens: int
    resident_tokens: int
    missed_by_state_tokens: int
    recompute_cost: float
    evicted_states: int


class ReplayRow(Totals, frozen=True):
    """The totals of a replay on state slots; they come last."""

    policy: str
    slots: int
    admission: str


def replay(
    schedule: ReplaySchedule, policy: str, slots: int, cost: CostModel | None = None
) -> ReplayRow:
    """Serve the schedule's requests one after the other with `slots` states at most.

    `policy` is one of the table that runs in a replay. `cost` is what its order may depend on, and
    weighs `recompute_cost`.
    """
    cost = cost or CostModel()
    hits, evicted = serve(schedule, policy, slots, cost)
    hit_tokens = sum(hits)
    resident_tokens = sum(request.resident_tokens for request in schedule.requests)
    return ReplayRow(
        policy=policy,
        slots=slots,
        admission=schedule.admission,
        requests=len(schedule.requests),
        rejected=schedule.rejected,
        prompt_tokens=sum(request.prompt_tokens for request in schedule.requests),
        hit_tokens=hit_tokens,
        resident_tokens=resident_tokens,
        missed_by_state_tokens=resident_tokens - hit_tokens,
        recompute_cost=sum(
            cost.cost(hit, request.prompt_tokens)
            for hit, request in zip(hits, schedule.requests, strict=True)
        ),
        evicted_states=evicted,
    )


def serve(
    schedule: ReplaySchedule, policy: str, slots: int, cost: CostModel
) -> tuple[list[int], int]:
    """Return the tokens hit by each request, and the number of states evicted, as `replay` does."""
    if slots < 1:
        raise SettingsError(f"slots is {slots}: give at least 1")
    if policy not in policy_names(REPLAY):
        raise SettingsError(f"unknown policy {policy!r}: use {', '.join(policy_names(REPLAY))}")
    if find_policy(policy).native is None:
        return ClairvoyantPolicy(schedule, slots).play()
    return play(schedule, make_index(policy, cost, slots), slots)


def play(schedule: ReplaySchedule, index: EvictionIndex, slots: int) -> tuple[list[int], int]:
    """Return the tokens hit by each request, and how many states `index` evicted."""
    resident, last = bytearray(len(schedule.depths)), schedule.last

    def below(candidate: int) -> list[int]:
        return directly_below(candidate, last, resident) if last[candidate] > candidate else []

    simulator = SlotSimulator(index, slots, schedule.depths, resident, below)
    return [simulator.serve(request) for request in schedule.requests], simulator.evicted_states


class SlotSimulator:
    """Serves one request after the other with `slots` states at most, as `index` decides.

    `depths` and `resident` (whether a state is set there) are looked up by candidate; `below` says
    which resident states are directly below one.
    """

    def __init__(
        self,
        index: EvictionIndex,
        slots: int,
        depths: _ByCandidate,
        resident: _Flags,
        below: Callable[[int], Iterable[int]],
    ) -> None:
        self.evicted_states = 0
        self._index = index
        self._slots = slots
        self._depths = depths
        self._resident = resident
        self._below = below

    def serve(self, request: ScheduledRequest) -> int:
        """Return the tokens that the request hits."""
        index, depths, resident = self._index, self._depths, self._resident
        hit = next((c for c in request.resumable if resident[c]), None)
        if index.needs_prompts:  # the path takes longer than the rest
            path_depths = [depths[c] for c in request.path]
            index.on_prompt(request.path, path_depths, len(request.resumable), request.admitted)
        hit_tokens = 0
        if hit is not None:
            index.touch(hit)
            index.pin(hit)
            hit_tokens = depths[hit]
        if request.dropped:
            index.drop(request.dropped)
            for c in request.dropped:
                resident[c] = 0
        self._set_states(request, hit, hit_tokens)
        if hit is not None:
            index.unpin(hit)
        return hit_tokens

    def _set_states(self, request: ScheduledRequest, hit: int | None, hit_tokens: int) -> None:
        index, depths, resident = self._index, self._depths, self._resident
        on_path = [] if hit is None else [hit]  # states of this path, deepest last
        beyond = bisect_right(request.admitted, hit_tokens, key=depths.__getitem__)
        for c in request.admitted[beyond:]:
            is_end = c == request.admitted[-1]
            if resident[c]:
                index.touch(c, end=is_end)
                continue
            if len(index) >= self._slots:
                victims = index.evict(1)
                if not victims:
                    continue
                resident[victims[0]] = 0
                self.evicted_states += 1
            while on_path and not resident[on_path[-1]]:
                on_path.pop()
            parent = on_path[-1] if on_path else None
            index.insert(c, depths[c], parent, self._below(c), end=is_end)
            resident[c] = 1
            on_path.append(c)
