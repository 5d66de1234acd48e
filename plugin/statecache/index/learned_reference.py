"""The policy `learned` in plain Python: slow, obvious, and sharing no code with the C++.

A state's rank is the chance that it is the one resumed, for each unit of time it is kept, times
its gain. The chance is learnt by role, kind and age. What is evicted is tracked on as a *ghost*,
without data, so that eviction cannot hide what would have been resumed. The parent of a tracked
state is the nearest shallower tracked state on its path.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from statecache.index.learned_points import Point, Points, points_above
from statecache.index.learned_table import EVERY, HALVING, LearnedTable, age_bucket, floor_log2
from statecache.index.reference import MAX_DEPTH, ReferenceCost, ReferenceIndex, _integer, _State

__all__ = ["LearnedReference", "ShadowSelector"]

BLOCK_TOKENS = 512
ORDERS = ("learned", "gds", "lru")
DECAY = 0.9945994234836332  # halves in 128 requests
LONG_DECAY = 0.9996616064962437  # in 2,048
LEAD = 1.15  # by how much another order must be ahead to be active
LONG_LEAD = 1.01  # and in the long run to be the baseline in the place of learned


@dataclass(eq=False, slots=True)
class _TrackedState:
    point: Point
    end: bool = False  # of a prompt
    last: int = 0  # request of its last use
    generation: int = 0  # turns of its lineage before it
    superseded: int = 0  # prompt ends set below it since its last use
    evicted: int = 0  # 0 when resident, else which eviction made it a ghost


class LearnedReference(ReferenceIndex):
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
        index = {
            tracked: self._table.index(role, kind, age_bucket(self._now - tracked.last))
            for tracked, (role, kind) in self._classes().items()
        }
        best = {m.point.key: i for m, i in index.items() if not m.evicted}
        for ghost, of_ghost in index.items():
            if not ghost.evicted:
                continue
            inheritor = next((p.key for p in points_above(ghost.point) if p.key in best), None)
            if inheritor is not None:
                best[inheritor] = max(best[inheritor], of_ghost)
        return {key: (of_key * self._gain(key), self._gain(key)) for key, of_key in best.items()}

    def _gain(self, state: int) -> float:
        resident = self._states[state]
        shallower = resident.parent.depth if resident.parent is not None else 0
        return self._cost.cost(shallower, resident.depth)


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


class ShadowSelector:
    """Plays every prompt on three caches of `slots` states, and says whose order is to be active.

    The baseline is the one that saved most in the long run; another one is active in its place
    while it is well ahead in the short term. A prompt's states are set when the next prompt comes,
    after whatever was dropped in between.
    """

    def __init__(
        self, points: Points, cost: ReferenceCost, slots: int, learned: LearnedReference
    ) -> None:
        self._cost = cost
        others = [ReferenceIndex(policy, cost) for policy in ORDERS[1:]]
        self._shadows = [_Shadow(points, index, slots) for index in (learned, *others)]
        self._learned = learned
        self.gds = others[0]
        self.long_term_savings, self.short_term_savings = [0.0] * len(ORDERS), [0.0] * len(ORDERS)
        self._baseline = self._active = 0

    @property
    def order(self) -> str:
        """The policy whose order is active."""
        return ORDERS[self._active]

    def look_up(self, path: Sequence[Point], resumable: int, admitted: Sequence[int]) -> None:
        """Let each shadow find what it would have resumed."""
        self._learned.look_up(path, resumable, admitted)
        for shadow in self._shadows:
            shadow.look_up(path, resumable, admitted)

    def settle(self) -> None:
        """Let each shadow set the states of the last prompt, and compare what they saved."""
        for k, shadow in enumerate(self._shadows):
            saved = self._cost.cost(0, shadow.settle())
            self.short_term_savings[k] = self.short_term_savings[k] * DECAY + saved
            self.long_term_savings[k] = self.long_term_savings[k] * LONG_DECAY + saved
        longest, recent = self.long_term_savings, self.short_term_savings
        ahead = longest.index(max(longest))
        if longest[ahead] > longest[self._baseline] * (1.0 if ahead == 0 else LONG_LEAD):
            self._active = self._baseline = ahead
        if recent[self._baseline] >= recent[self._active]:
            self._active = self._baseline
        if max(recent) > recent[self._active] * LEAD:
            self._active = recent.index(max(recent))

    def drop(self, key: int) -> None:
        """Forget a point whose KV is gone."""
        for shadow in self._shadows:
            shadow.drop(key)


class _Shadow:
    """One cache without data, whose states hold their points."""

    def __init__(self, points: Points, index: ReferenceIndex, slots: int) -> None:
        self._points = points
        self._index = index
        self._slots = slots
        self._held: dict[int, Point] = {}
        self._path: Sequence[Point] = ()
        self._admitted: Sequence[int] = ()
        self._hit: Point | None = None

    def look_up(self, path: Sequence[Point], resumable: int, admitted: Sequence[int]) -> None:
        self._path, self._admitted = path, admitted
        self._hit = next((p for p in reversed(path[:resumable]) if p.key in self._held), None)
        if self._hit is not None:
            self._index.touch(self._hit.key)
            self._index.pin(self._hit.key)

    def settle(self) -> int:
        """Set the states of the last request; return the depth it resumed from."""
        depth = 0 if self._hit is None else self._hit.depth
        for point in self._path:
            if point.depth > depth and point.key in self._admitted:
                self._set(point, end=point.key == self._admitted[-1])
        if self._hit is not None and self._hit.key in self._held:
            self._index.unpin(self._hit.key)
        self._path, self._admitted, self._hit = (), (), None
        return depth

    def drop(self, key: int) -> None:
        self._index.drop([key])
        self._let_go(key)

    def _set(self, point: Point, *, end: bool) -> None:
        if point.key in self._held:
            self._index.touch(point.key, end=end)
            return
        if len(self._held) >= self._slots:
            victims = self._index.evict(1)
            if not victims:
                return
            self._let_go(victims[0])
        above = next((p.key for p in points_above(point) if p.key in self._held), None)
        below = [p.key for p in self._directly_below(point)]
        self._index.insert(point.key, point.depth, above, below, end=end)
        self._held[point.key] = point
        point.holders += 1

    def _let_go(self, key: int) -> None:
        point = self._held.pop(key, None)
        if point is not None:
            self._points.release(point)

    def _directly_below(self, point: Point) -> Iterator[Point]:
        for below in point.below:
            if below.key in self._held:
                yield below
            else:
                yield from self._directly_below(below)
