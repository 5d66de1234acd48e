"""Prefix points by their keys, as a tree: what the plain form of `learned` knows of prompts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

__all__ = ["HELD_PATHS", "Point", "Points", "points_above"]

HELD_PATHS = 256  # paths of requests whose states may still be on their way


@dataclass(eq=False, slots=True)
class Point:
    """A place in a prompt. It lives while something holds it or a deeper point."""

    key: int
    depth: int
    above: Point | None
    below: list[Point] = field(default_factory=list)
    holders: int = 0


class Points:
    """All points that something holds, and those above them.

    A point's place is fixed by the path that names it first: below the point before it, and above
    the next one of that path if nothing was in between.
    """

    def __init__(self) -> None:
        self._by_key: dict[int, Point] = {}
        self._paths: deque[list[Point]] = deque()

    def __len__(self) -> int:
        return len(self._by_key)

    def find(self, key: int) -> Point | None:
        """Return the point of this key, if known."""
        return self._by_key.get(key)

    def check_depth(self, key: int, depth: int) -> None:
        """Raise `ValueError` if the point of this key is known at another depth."""
        point = self._by_key.get(key)
        if point is not None and point.depth != depth:
            raise ValueError(f"point {key} has depth {point.depth}, not {depth}")

    def offer(self, keys: Sequence[int], depths: Sequence[int]) -> list[Point]:
        """Return the points of a path, shallowest first, and hold it for `HELD_PATHS` more."""
        for key, depth in zip(keys, depths, strict=True):
            self.check_depth(key, depth)
        path: list[Point] = []
        known: Point | None = None  # the deepest so far that was there before
        for key, depth in zip(keys, depths, strict=True):
            last = path[-1] if path else None
            point = self._by_key.get(key)
            if point is None:
                point = self._add(key, depth, last)
            else:
                if last is not known and last is not None and point.above is known:
                    self._move(point, last)
                known = point
            path.append(point)
        for point in path:
            point.holders += 1
        self._paths.append(path)
        if len(self._paths) > HELD_PATHS:
            for point in reversed(self._paths.popleft()):
                self.release(point)
        return path

    def ensure(
        self, key: int, depth: int, above: Point | None, below: Sequence[Point] = ()
    ) -> Point:
        """Return the point of this key, putting it between `above` and `below` if it is new.

        Whoever calls holds it.
        """
        point = self._by_key.get(key)
        if point is not None:
            return point
        point = self._add(key, depth, above)
        for deeper in below:
            top = deeper
            while top.above is not None and top.above.depth > depth:
                top = top.above
            if top.above is above:
                self._move(top, point)
        return point

    def release(self, point: Point) -> None:
        """Undo one hold; points that nothing needs are forgotten."""
        point.holders -= 1
        gone: Point | None = point
        while gone is not None and gone.holders == 0 and not gone.below:
            del self._by_key[gone.key]
            if gone.above is not None:
                gone.above.below.remove(gone)
            gone = gone.above

    def _add(self, key: int, depth: int, above: Point | None) -> Point:
        point = self._by_key[key] = Point(key, depth, above)
        if above is not None:
            above.below.append(point)
        return point

    def _move(self, point: Point, above: Point) -> None:
        if point.above is not None:
            point.above.below.remove(point)
        point.above = above
        above.below.append(point)


def points_above(point: Point) -> Iterator[Point]:
    """Yield the points above this one, nearest first."""
    above = point.above
    while above is not None:
        yield above
        above = above.above
