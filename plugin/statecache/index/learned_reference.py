"""The policy `learned` in plain Python: slow, obvious, and sharing no code with the C++.

Each state is ranked by the chance that it is the one resumed, for each unit of time it is kept,
times its gain. The chance is learnt by role, kind and age. What is evicted lives on as a *ghost*,
without data, so that eviction cannot hide what would have been resumed. A *member* is a resident
state or a ghost; its parent among the members is the nearest shallower one on its path.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from statecache.index.learned_guard import Guard
from statecache.index.learned_points import Point, Points, points_above
from statecache.index.learned_table import EVERY, HALVING, LearnedTable, age_bucket, floor_log2
from statecache.index.reference import MAX_DEPTH, ReferenceCost, ReferenceIndex, _integer, _State

__all__ = ["LearnedReference"]

BLOCK_TOKENS = 512


@dataclass(eq=False, slots=True)
class _Member:
    point: Point
    end: bool = False  # of a prompt
    last: int = 0  # request of its last use
    generation: int = 0  # turns of its lineage before it
    superseded: int = 0  # prompt ends set below it since its last use
    evicted: int = 0  # 0 when resident, else which eviction made it a ghost


class LearnedReference(ReferenceIndex):
    """`StateIndex` under `learned`: a state's id is the key of its point.

    With `slots` a guard plays learned, gds and lru beside it and follows whoever saves most.
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
        self._members: dict[int, _Member] = {}
        self._table = LearnedTable()
        self._requests = 0
        self._evictions = 0
        self._sources: dict[Point, int | None] = {}  # which point its request would have resumed
        self._guard = None
        if slots is not None:
            shadow = LearnedReference(self._cost, None, ghosts, self._points)
            self._guard = Guard(self._points, self._cost, slots, shadow)

    @property
    def order(self) -> str:
        return "learned" if self._guard is None else self._guard.order

    @property
    def ghosts(self) -> int:
        return len(self._members) - len(self)

    @property
    def points(self) -> int:
        return len(self._points)

    def on_prompt(
        self,
        points: Sequence[int],
        depths: Sequence[int],
        resumable: int,
        admitted: Sequence[int],
    ) -> None:
        _check_request(points, depths, resumable, admitted)
        path = self._points.offer(points, depths)
        before = self.order
        if self._guard is not None:
            self._guard.settle()
        self.look_up(path, resumable, admitted)
        if self._guard is not None:
            self._guard.look_up(path, resumable, admitted)
            if before != self.order == "gds":
                self._adopt(self._guard.gds)

    def look_up(self, path: Sequence[Point], resumable: int, admitted: Sequence[int]) -> None:
        """Learn from a request whose path is known already."""
        now = self._requests
        if now % EVERY == 0:
            self._table.expose(
                (role, kind, age_bucket(now - member.last))
                for member, (role, kind) in self._classes().items()
            )
        resumed = next((p for p in reversed(path[:resumable]) if p.key in self._members), None)
        if resumed is not None:
            member = self._members[resumed.key]
            role, kind = self._classes()[member]
            self._table.hit(role, kind, age_bucket(now - member.last))
            member.last = now
            member.superseded = 0
        for point in path:
            if point.key in admitted:
                self._sources[point] = None if resumed is None else resumed.key
        if now % EVERY == 0:
            self._table.rebuild()
        if now % HALVING == HALVING - 1:
            self._table.halve()
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
        above = None if parent is None else self._members[parent].point
        below = [self._members[child].point for child in children]
        point = self._points.ensure(state, depth, above, below)
        key = self._sources.get(point)
        source = None if key is None else self._members.get(key)
        member = self._members.get(state)
        if member is None:
            point.holders += 1
            member = self._members[state] = _Member(point)
        member.generation = 0 if source is None else source.generation + 1
        member.last = self._now
        member.superseded = 0
        member.evicted = 0
        member.end = end
        if end:
            self._supersede(member)

    def touch(self, state: int, *, end: bool = False) -> None:
        super().touch(state)
        member = self._members[state]
        member.last = self._now
        if end:
            member.end = True
            self._supersede(member)

    def erase(self, state: int) -> None:
        super().erase(state)
        self._evictions += 1
        self._members[state].evicted = self._evictions
        while self.ghosts > self._most_ghosts:
            oldest = min((m for m in self._members.values() if m.evicted), key=lambda m: m.evicted)
            self._forget(oldest)

    def drop(self, points: Iterable[int]) -> None:
        for key in [_integer(point) for point in points]:
            if self._guard is not None:
                self._guard.drop(key)
            if key in self:
                super().erase(key)
            if key in self._members:
                self._forget(self._members[key])

    def rank(self, state: int) -> float:
        return self._values()[self._resident(state).id][0]

    def next_victim(self) -> int | None:
        if self.order == "learned":
            self._ranks = self._values()
        return super().next_victim()

    def _order(self, state: _State) -> tuple[float, ...]:
        if self.order == "learned":
            return *self._ranks[state.id], state.last_use
        if self.order == "lru":
            return (state.last_use,)
        return super()._order(state)

    @property
    def _now(self) -> int:
        return max(0, self._requests - 1)

    def _supersede(self, member: _Member) -> None:
        for above in points_above(member.point):
            if above.key in self._members:
                self._members[above.key].superseded += 1

    def _forget(self, member: _Member) -> None:
        del self._members[member.point.key]
        self._points.release(member.point)

    def _above(self, member: _Member) -> _Member | None:
        above = (self._members.get(point.key) for point in points_above(member.point))
        return next(filter(None, above), None)

    def _classes(self) -> dict[_Member, tuple[int, int]]:
        """Return role and kind of every member."""
        above = {member: self._above(member) for member in self._members.values()}
        children = dict.fromkeys(above, 0)
        for parent in above.values():
            if parent is not None:
                children[parent] += 1
        return {m: _class_of(m, parent, children[m]) for m, parent in above.items()}

    def _values(self) -> dict[int, tuple[float, float]]:
        """Return the rank and the gain of every resident state."""
        index = {
            member: self._table.index(role, kind, age_bucket(self._now - member.last))
            for member, (role, kind) in self._classes().items()
        }
        best = {m.point.key: i for m, i in index.items() if not m.evicted}
        for ghost, worth in index.items():
            if not ghost.evicted:
                continue
            heir = next((p.key for p in points_above(ghost.point) if p.key in best), None)
            if heir is not None:
                best[heir] = max(best[heir], worth)
        return {key: (worth * self._gain(key), self._gain(key)) for key, worth in best.items()}

    def _gain(self, state: int) -> float:
        resident = self._states[state]
        shallower = resident.parent.depth if resident.parent is not None else 0
        return self._cost.cost(shallower, resident.depth)


def _class_of(member: _Member, above: _Member | None, children: int) -> tuple[int, int]:
    role = min(children, 2) + (0 if member.end else 3)
    if children == 0:
        return role, min(member.generation, 3)
    tokens = member.point.depth - (above.point.depth if above is not None else 0)
    return role, 8 * (member.superseded >= 2) + min(7, floor_log2(tokens // BLOCK_TOKENS))


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
