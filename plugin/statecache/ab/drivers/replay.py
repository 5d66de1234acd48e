"""The driver `replay`: the built-in replay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from statecache.ab.drivers.base import Turn

if TYPE_CHECKING:
    from collections.abc import Hashable

    from statecache.ab.arms import Arm
    from statecache.ab.drivers.base import Context
    from statecache.ab.results import Played
    from statecache.ab.trial import Cell

__all__ = ["ReplayDriver"]


class ReplayDriver:
    """Plays arms of the built-in replay, in this process."""

    turn = Turn.IN_TURN

    def __init__(self, context: Context, _key: Hashable = None) -> None:
        self.versions: dict[str, str] = {}
        self._replays = context.replays

    def start(self) -> None:
        """Nothing has to be started."""

    def play(self, cell: Cell, arm: Arm, seed: int) -> Played:
        """Serve the requests of the workload one after the other."""
        return self._replays.of(cell.workload, seed).play(arm)

    def close(self) -> None:
        """Nothing has to be ended."""
