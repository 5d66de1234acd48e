"""A policy of its own, in plain Python: the file and the row that adding one takes."""

from statecache import ReferenceIndex
from statecache.index.policies import ENGINE, REPLAY, PolicySpec
from statecache.index.reference import _State


class ShallowestFirst(ReferenceIndex):
    """Drops the shallowest state first."""

    @property
    def policy(self) -> str:
        return "shallowest"

    def rank(self, state: int) -> float:
        return self._resident(state).depth

    def _sort_key(self, state: _State) -> tuple[float, ...]:
        return state.depth, state.last_use


ROW = PolicySpec(
    name="shallowest",
    summary="the shallowest",
    native=lambda _cost, _slots, _ghosts: ShallowestFirst(),
    reference=lambda _cost, _slots, _ghosts: ShallowestFirst(),
    runs_in=frozenset({ENGINE, REPLAY}),
)
