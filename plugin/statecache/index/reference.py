"""The state index again, in plain Python: slow, obvious, and sharing no code with the C++.

It is the oracle of the tests. Nothing falls back to it by itself.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

MAX_DEPTH = 2**31 - 1
MAX_COST = 1e280
POLICIES = ("gds", "lru")


@dataclass(frozen=True, slots=True)
class ReferenceCost:
    """Time to compute the states between two depths, as `CostModel` defines it.

    Raises `ValueError` unless both coefficients are finite and >= 0, one of them is above 0, and
    the deepest possible state costs at most 1e280.
    """

    linear: float = 1.862e-5
    quadratic: float = 3.33e-6

    def __post_init__(self) -> None:
        if not (math.isfinite(self.linear) and math.isfinite(self.quadratic)):
            raise ValueError("cost coefficients must be finite numbers")
        if self.linear < 0 or self.quadratic < 0:
            raise ValueError("cost coefficients must not be negative")
        if self.linear == 0 and self.quadratic == 0:
            raise ValueError("cost coefficients must not both be 0")
        if not self.cost(0, MAX_DEPTH) <= MAX_COST:
            raise ValueError("cost coefficients are too large: a deep state costs over 1e280")

    def cost(self, from_depth: int, to_depth: int) -> float:
        """Return the cost of computing tokens `from_depth` (excluded) to `to_depth`."""
        if not 0 <= from_depth <= to_depth <= MAX_DEPTH:
            raise ValueError(f"cost needs 0 <= from_depth <= to_depth <= {MAX_DEPTH}")
        tokens = to_depth - from_depth
        squares = to_depth * to_depth - from_depth * from_depth
        return self.linear * tokens + self.quadratic * squares / 2e5


def _integer(value: int) -> int:
    """Return `value` as the native index takes it, or raise its error."""
    number = operator.index(value)
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{number} does not fit in 64 bits")
    return number


@dataclass(eq=False, slots=True)
class _State:
    id: int
    depth: int
    parent: _State | None
    children: list[_State] = field(default_factory=list)
    pins: int = 0
    stamp: float = 0.0
    last_use: int = 0


class ReferenceIndex:
    """`StateIndex`, recomputing every priority at every eviction: O(n) a victim.

    Same calls, same victims, same errors; `check()` verifies the tree.
    """

    def __init__(self, policy: str = "gds", cost: ReferenceCost | None = None) -> None:
        if policy not in POLICIES:
            raise ValueError(f"unknown policy '{policy}': use gds or lru")
        self._policy = policy
        self._cost = cost or ReferenceCost()
        self._states: dict[int, _State] = {}
        self._watermark = 0.0
        self._uses = 0
        self._proposed: list[_State] | None = None  # None outside a walk

    def insert(
        self,
        state: int,
        depth: int,
        parent: int | None = None,
        children: Iterable[int] = (),
        *,
        end: bool = False,
    ) -> None:
        del end  # for `learned`
        state, depth = _integer(state), _integer(depth)
        if state in self._states:
            raise ValueError(f"state {state} is already resident")
        if not 0 <= depth <= MAX_DEPTH:
            raise ValueError(f"state {state} has depth {depth}, outside 0 .. {MAX_DEPTH}")
        above = None if parent is None else self._resident(parent)
        if above is not None and above.depth >= depth:
            raise ValueError(f"state {state} needs a shallower parent than state {parent}")
        below = [self._resident(child) for child in children]
        for child in below:
            if child.depth <= depth:
                raise ValueError(f"state {state} needs deeper children than state {child.id}")
            if child.parent is not above:
                raise ValueError(f"state {child.id} hangs under another parent than state {state}")
        if len({child.id for child in below}) != len(below):
            raise ValueError(f"state {state} lists a child twice")
        new = _State(state, depth, above, children=below)
        for child in below:
            child.parent = new
            if above is not None:
                above.children.remove(child)
        if above is not None:
            above.children.append(new)
        self._states[state] = new
        self._stamp(new)

    def touch(self, state: int, *, end: bool = False) -> None:
        del end  # for `learned`
        self._stamp(self._resident(state))

    def pin(self, state: int) -> None:
        self._resident(state).pins += 1

    def unpin(self, state: int) -> None:
        pinned = self._resident(state)
        if pinned.pins == 0:
            raise ValueError(f"state {state} is not pinned")
        pinned.pins -= 1
        if pinned.pins == 0:
            self._stamp(pinned)

    def erase(self, state: int) -> None:
        gone = self._resident(state)
        for child in gone.children:
            child.parent = gone.parent
        if gone.parent is not None:
            gone.parent.children.remove(gone)
            gone.parent.children.extend(gone.children)
        del self._states[state]

    def drop(self, points: Iterable[int]) -> None:
        for point in [_integer(point) for point in points]:
            if point in self._states:
                self.erase(point)

    def on_prompt(
        self, points: Sequence[int], depths: Sequence[int], resumable: int, admitted: Sequence[int]
    ) -> None:
        del points, depths, resumable, admitted  # for `learned`

    @property
    def policy(self) -> str:
        return self._policy

    @property
    def needs_prompts(self) -> bool:
        return False

    @property
    def order(self) -> str:
        return self._policy

    @property
    def ghosts(self) -> int:
        return 0

    @property
    def points(self) -> int:
        return 0

    def begin_walk(self) -> None:
        if self._proposed is not None:
            raise RuntimeError("begin_walk inside a walk: call end_walk first")
        self._proposed = []

    def next_victim(self) -> int | None:
        proposed = self._walk("next_victim")
        candidates = [s for s in self._states.values() if s.pins == 0 and s not in proposed]
        if not candidates:
            return None
        victim = self._choose(candidates)
        proposed.append(victim)
        return victim.id

    def evicted(self, state: int) -> None:
        proposed = self._walk("evicted")
        victim = self._resident(state)
        if victim not in proposed:
            raise ValueError(f"state {state} was not proposed in this walk")
        if victim.pins > 0:
            raise ValueError(f"state {state} is pinned")
        self._watermark = max(self._watermark, self._priority(victim))
        self.erase(state)

    def end_walk(self) -> None:
        self._walk("end_walk")
        self._proposed = None

    def evict(self, n: int) -> list[int]:
        if _integer(n) < 0:
            raise ValueError(f"cannot evict {n} states")
        self.begin_walk()
        victims: list[int] = []
        while len(victims) < n and (victim := self.next_victim()) is not None:
            self.evicted(victim)
            victims.append(victim)
        self.end_walk()
        return victims

    def priority(self, state: int) -> float:
        return self._priority(self._resident(state))

    def rank(self, state: int) -> float:
        return self.priority(state)

    @property
    def watermark(self) -> float:
        return self._watermark

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, state: object) -> bool:
        return state in self._states

    def check(self) -> None:
        for state in self._states.values():
            if state.stamp > self._watermark:
                raise RuntimeError(f"state {state.id}: stamp above the watermark")
            parent = state.parent
            if parent is not None:
                if self._states.get(parent.id) is not parent:
                    raise RuntimeError(f"state {state.id}: parent is not resident")
                if parent.depth >= state.depth:
                    raise RuntimeError(f"state {state.id}: parent is not shallower")
                if parent.children.count(state) != 1:
                    raise RuntimeError(f"state {state.id}: not listed once by its parent")
            for child in state.children:
                if child.parent is not state:
                    raise RuntimeError(f"state {child.id}: does not know its parent")

    def _resident(self, state: int) -> _State:
        try:
            return self._states[_integer(state)]
        except KeyError:
            raise KeyError(f"state {state} is not resident") from None

    def _stamp(self, state: _State) -> None:
        self._uses += 1
        state.stamp = self._watermark
        state.last_use = self._uses

    def _priority(self, state: _State) -> float:
        if self._policy == "lru":
            return 0.0
        shallower = state.parent.depth if state.parent is not None else 0
        return state.stamp + self._cost.cost(shallower, state.depth)

    def _choose(self, candidates: list[_State]) -> _State:
        return min(candidates, key=self._sort_key)

    def _sort_key(self, state: _State) -> tuple[float, ...]:
        """Return what the lowest of goes first."""
        return self._priority(state), state.last_use

    def _adopt(self, other: ReferenceIndex) -> None:
        """Take the watermark and the stamps of `other`; the rest counts as used now."""
        self._watermark = other._watermark
        for key, state in self._states.items():
            theirs = other._states.get(key)
            state.stamp = self._watermark if theirs is None else theirs.stamp

    def _walk(self, call: str) -> list[_State]:
        if self._proposed is None:
            raise RuntimeError(f"{call} outside a walk: call begin_walk")
        return self._proposed
