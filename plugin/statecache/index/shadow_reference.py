"""Caches without data that play `learned`, gds and lru beside the real one, in plain Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from statecache.index.learned_points import Point, Points, points_above
from statecache.index.reference import ReferenceCost, ReferenceIndex

__all__ = ["ORDERS", "LearningIndex", "ShadowSelector"]

ORDERS = ("learned", "gds", "lru")
DECAY = 0.9945994234836332  # halves in 128 requests
LONG_DECAY = 0.9996616064962437  # in 2,048
LEAD = 1.01  # by how much another order than learned must be ahead
PERSISTENCE = 600  # and for how many requests in a row


class LearningIndex(ReferenceIndex):
    """An index that learns from requests whose path is known."""

    def look_up(self, path: Sequence[Point], resumable: int, admitted: Sequence[int]) -> None:
        """Learn from a request whose path is known already."""
        raise NotImplementedError


class ShadowSelector:
    """Plays every prompt on three caches of `slots` states, and says whose order is to be active.

    Learned is, until another one is ahead both in the long run and in the short term for many
    requests in a row; and learned again when it leads in the long run. A prompt's states are set
    when the next prompt comes, after whatever was dropped in between.
    """

    def __init__(
        self, points: Points, cost: ReferenceCost, slots: int, learned: LearningIndex
    ) -> None:
        self._cost = cost
        others = [ReferenceIndex(policy, cost) for policy in ORDERS[1:]]
        self._shadows = [_Shadow(points, index, slots) for index in (learned, *others)]
        self._learned = learned
        self.gds = others[0]
        self.long_term_savings, self.short_term_savings = [0.0] * len(ORDERS), [0.0] * len(ORDERS)
        self._active = 0
        self._ahead_for = 0  # requests in a row in which another one led

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
        longest, recent, active = self.long_term_savings, self.short_term_savings, self._active
        leader = longest.index(max(longest))
        lead = 1.0 if leader == 0 else LEAD
        leads = longest[leader] > longest[active] * lead and (
            leader == 0 or recent[leader] > recent[active] * lead
        )
        self._ahead_for = self._ahead_for + 1 if leads else 0
        if leads and (leader == 0 or self._ahead_for > PERSISTENCE):
            self._active, self._ahead_for = leader, 0

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
