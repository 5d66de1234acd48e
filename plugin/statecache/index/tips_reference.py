"""The policy `gds-tips` in plain Python."""

from __future__ import annotations

from math import sqrt

from statecache.index.reference import ReferenceCost, ReferenceIndex, _State

__all__ = ["TipsReference"]


class TipsReference(ReferenceIndex):
    """`StateIndex` under `gds-tips`, recomputing every priority at every eviction.

    As gds, with the square root of the gain, and none for a state in the middle of a path: one
    state is directly below it, which again has others below.
    """

    def __init__(self, cost: ReferenceCost | None = None) -> None:
        super().__init__("gds", cost)
        self._policy = "gds-tips"

    def _priority(self, state: _State) -> float:
        if len(state.children) == 1 and state.children[0].children:
            return state.stamp
        shallower = 0 if state.parent is None else state.parent.depth
        return state.stamp + sqrt(self._cost.cost(shallower, state.depth))
