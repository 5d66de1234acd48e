"""The policy `learned` in plain Python: slow, obvious, and sharing no code with the C++.

A state's rank is the chance that it is the one resumed, for each unit of time it is kept, times
its gain. The chance is learnt by role, kind and age. What is evicted is tracked on as a *ghost*,
without data, so that eviction cannot hide what would have been resumed. The parent of a tracked
state is the nearest shallower tracked state on its path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

from statecache.index.learned_points import Point, Points, points_above
from statecache.index.learned_table import EVERY, LearnedTable, age_bucket, floor_log2
from statecache.index.reference import MAX_DEPTH, ReferenceCost, _integer, _State
from statecache.index.shadow_reference import LearningIndex, ShadowSelector

__all__ = ["LearnedReference"]

BLOCK_TOKENS = 512
REACH = 64  # states of a chain that are looked at on each side of a victim
ADDING_UP = 2  # roles whose ghosts add up: prompt ends with one tracked state below them at most


@dataclass(eq=False, slots=True)
class _TrackedState:
    point: Point
    end: bool = False  # of a prompt
    last: int = 0  # request of its last use
    generation: int = 0  # turns of its lineage before it
    superseded: int = 0  # prompt ends set below it since its last use
    evicted: int = 0  # 0 when resident, else which eviction made it a ghost


class LearnedReference(LearningIndex):
    """`StateIndex` under `learned`: a state's id is the key of its point.

    With `slots` it plays learned, gds and lru beside the cache, without data, and evicts in the
    order of the one that saves most.
    """

    def __init__(
        self,
        cost: ReferenceCost | None = None,
        slots: int | None = None,
        ghosts: int = 4096,
        points: Points | None = None,
    ) -> None:
        super().__init__("gds", cost)
        self._most_ghosts = ghosts
        self._points = Points() if points is None else points
        self._tracked: dict[int, _TrackedState] = {}
        self._table = LearnedTable()
        self._requests = 0
        self._evictions = 0
        self._sources: dict[Point, int | None] = {}  # which point its request would have resumed
        self._selector = None
        if slots is not None:
            shadow = LearnedReference(self._cost, None, ghosts, self._points)
            self._selector = ShadowSelector(self._points, self._cost, slots, shadow)

    @property
    def policy(self) -> str:
        return "learned"

    @property
    def needs_prompts(self) -> bool:
        return True

    @property
    def order(self) -> str:
        return "learned" if self._selector is None else self._selector.order

    @property
    def ghosts(self) -> int:
        return len(self._tracked) - len(self)

    @property
    def points(self) -> int:
        return len(self._points)

    def on_prompt(
        self, points: Sequence[int], depths: Sequence[int], resumable: int, admitted: Sequence[int]
    ) -> None:
        _check_request(points, depths, resumable, admitted)
        path = self._points.offer(points, depths)
        before = self.order
        if self._selector is not None:
            self._selector.settle()
        self.look_up(path, resumable, admitted)
        if self._selector is not None:
            self._selector.look_up(path, resumable, admitted)
            if before != self.order == "gds":
                self._adopt(self._selector.gds)

    def look_up(self, path: Sequence[Point], resumable: int, admitted: Sequence[int]) -> None:
        """Learn from a request whose path is known already."""
        now = self._requests
        if now % EVERY == 0:
            self._table.expose(
                (role, kind, age_bucket(now - tracked.last))
                for tracked, (role, kind) in self._classes().items()
            )
        resumed = next((p for p in reversed(path[:resumable]) if p.key in self._tracked), None)
        if resumed is not None:
            tracked = self._tracked[resumed.key]
            role, kind = self._classes()[tracked]
            self._table.hit(role, kind, age_bucket(now - tracked.last))
            tracked.last = now
            tracked.superseded = 0
        for point in path:
            if point.key in admitted:
                self._sources[point] = None if resumed is None else resumed.key
        if now % EVERY == 0:
            self._table.rebuild()
            self._table.fade()
        self._requests += 1

    def insert(
        self,
        state: int,
        depth: int,
        parent: int | None = None,
        children: Iterable[int] = (),
        *,
        end: bool = False,
    ) -> None:
        children = list(children)
        if state not in self:
            self._points.check_depth(state, depth)
        super().insert(state, depth, parent, children)
        above = None if parent is None else self._tracked[parent].point
        below = [self._tracked[child].point for child in children]
        point = self._points.ensure(state, depth, above, below)
        key = self._sources.get(point)
        source = None if key is None else self._tracked.get(key)
        tracked = self._tracked.get(state)
        if tracked is None:
            point.holders += 1
            tracked = self._tracked[state] = _TrackedState(point)
        tracked.generation = 0 if source is None else source.generation + 1
        tracked.last = self._now
        tracked.superseded = 0
        tracked.evicted = 0
        tracked.end = end
        if end:
            self._supersede(tracked)

    def touch(self, state: int, *, end: bool = False) -> None:
        super().touch(state)
        tracked = self._tracked[state]
        tracked.last = self._now
        if end:
            tracked.end = True
            self._supersede(tracked)

    def erase(self, state: int) -> None:
        super().erase(state)
        self._evictions += 1
        self._tracked[state].evicted = self._evictions
        while self.ghosts > self._most_ghosts:
            oldest = min((m for m in self._tracked.values() if m.evicted), key=lambda m: m.evicted)
            self._forget(oldest)

    def drop(self, points: Iterable[int]) -> None:
        for key in [_integer(point) for point in points]:
            if self._selector is not None:
                self._selector.drop(key)
            if key in self:
                super().erase(key)
            if key in self._tracked:
                self._forget(self._tracked[key])

    def rank(self, state: int) -> float:
        return self._values()[self._resident(state).id][0]

    def next_victim(self) -> int | None:
        if self.order == "learned":
            self._ranks = self._values()
        return super().next_victim()

    def _choose(self, candidates: list[_State]) -> _State:
        victim = super()._choose(candidates)
        if self.order != "learned" or not _in_chain(victim) or not _is_first(victim):
            return victim
        below = takewhile(_in_chain, _states_from(victim.children[0], lambda s: s.children[0]))
        above = takewhile(_in_chain, _states_from(victim.parent, lambda s: s.parent))
        others = [*islice(below, REACH), *islice(above, REACH)]
        spare = [s for s in others if s in candidates and not _is_first(s)]
        if not spare or 2 * (len(others) + 1) <= min(len(self), 2 * REACH):
            return victim
        return super()._choose(spare)

    def _sort_key(self, state: _State) -> tuple[float, ...]:
        if self.order == "learned":
            return *self._ranks[state.id], state.last_use
        if self.order == "lru":
            return (state.last_use,)
        return super()._sort_key(state)

    @property
    def _now(self) -> int:
        return max(0, self._requests - 1)

    def _supersede(self, tracked: _TrackedState) -> None:
        for above in points_above(tracked.point):
            if above.key in self._tracked:
                self._tracked[above.key].superseded += 1

    def _forget(self, tracked: _TrackedState) -> None:
        del self._tracked[tracked.point.key]
        self._points.release(tracked.point)

    def _above(self, tracked: _TrackedState) -> _TrackedState | None:
        above = (self._tracked.get(point.key) for point in points_above(tracked.point))
        return next(filter(None, above), None)

    def _classes(self) -> dict[_TrackedState, tuple[int, int]]:
        """Return role and kind of every tracked state."""
        above = {tracked: self._above(tracked) for tracked in self._tracked.values()}
        children = dict.fromkeys(above, 0)
        for parent in above.values():
            if parent is not None:
                children[parent] += 1
        return {m: _class_of(m, parent, children[m]) for m, parent in above.items()}

    def _values(self) -> dict[int, tuple[float, float]]:
        """Return the rank and the gain of every resident state."""
        buckets = {
            tracked: (role, kind, age_bucket(self._now - tracked.last))
            for tracked, (role, kind) in self._classes().items()
        }
        own = {m.point.key: self._table.index(*b) for m, b in buckets.items() if not m.evicted}
        ghosts: dict[int, Counter[tuple[int, int, int]]] = {key: Counter() for key in own}
        for ghost, bucket in buckets.items():
            inheritor = next((p.key for p in points_above(ghost.point) if p.key in own), None)
            if ghost.evicted and inheritor is not None:
                ghosts[inheritor][bucket] += 1
        gains = {key: self._gain(key) for key in own}
        return {
            key: (self._worth(own[key], ghosts[key]) * gain, gain) for key, gain in gains.items()
        }

    def _worth(self, own: float, ghosts: Counter[tuple[int, int, int]]) -> float:
        """Return the index of the best ghost, or `own` with the chances of those that add up."""
        best = max((self._table.index(*bucket) for bucket in ghosts), default=0.0)
        chances = 0.0
        for bucket, count in sorted(ghosts.items()):  # sums are the same whatever came first
            if bucket[0] < ADDING_UP:
                chances += count * self._table.rate(*bucket)
        return max(best, own + chances)

    def _gain(self, state: int) -> float:
        resident = self._states[state]
        shallower = resident.parent.depth if resident.parent is not None else 0
        return self._cost.cost(shallower, resident.depth)


def _in_chain(state: _State) -> bool:
    """Return whether exactly one state is directly below this one."""
    return len(state.children) == 1


def _is_first(state: _State) -> bool:
    """Return whether the one above, if any, is in a lower doubling of depth."""
    above = 0 if state.parent is None else state.parent.depth
    return state.depth.bit_length() > above.bit_length()


def _states_from(
    first: _State | None, following: Callable[[_State], _State | None]
) -> Iterator[_State]:
    state = first
    while state is not None:
        yield state
        state = following(state)


def _class_of(
    tracked: _TrackedState, above: _TrackedState | None, children: int
) -> tuple[int, int]:
    role = min(children, 2) + (0 if tracked.end else 3)
    if children == 0:
        return role, min(tracked.generation, 3)
    tokens = tracked.point.depth - (above.point.depth if above is not None else 0)
    return role, 8 * (tracked.superseded >= 2) + min(7, floor_log2(tokens // BLOCK_TOKENS))


def _check_request(
    points: Sequence[int], depths: Sequence[int], resumable: int, admitted: Sequence[int]
) -> None:
    """Raise `ValueError` unless these describe one prompt."""
    if len(points) != len(depths):
        raise ValueError(f"{len(points)} points have {len(depths)} depths")
    before = -1
    places: dict[int, int] = {}
    for place, (point, depth) in enumerate(zip(points, depths, strict=True)):
        if not before < _integer(depth) <= MAX_DEPTH:
            raise ValueError(f"point {point} at depth {depth} is not below the one before it")
        if places.setdefault(_integer(point), place) != place:
            raise ValueError(f"point {point} is on the path twice")
        before = depth
    if not 0 <= _integer(resumable) <= len(points):
        raise ValueError(f"{resumable} of {len(points)} points cannot be resumable")
    before = -1
    for point in admitted:
        place = places.get(_integer(point), -1)
        if place <= before:
            raise ValueError(f"point {point} is admitted out of the order of its path")
        before = place
