"""What every driver does: the one interface that a test plays its arms through.

A driver is found by the name that an arm has in `driver`: `DRIVERS` in `statecache.ab.bench`.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from statecache.ab.drivers.trace_replay import SharedReplays
    from statecache.ab.results import Run
    from statecache.ab.trial import Cell, Trial

__all__ = ["ArmError", "Context", "Driver", "Measured", "Turn"]


class ArmError(Exception):
    """An arm could not be played; the message is one line. The other arms can go on."""


class Turn(Enum):
    """When a driver plays the arms of a seed."""

    IN_BACKGROUND = "in a thread of its own: another process does the work"
    IN_TURN = "in the main thread, while those in the background play"
    ALONE = "after all others, one arm at a time: it is timed"


class Context(NamedTuple):
    """What the drivers of a test share.

    Logs go to `folder`; `say` gets a line about what takes long.
    """

    trial: Trial
    folder: Path
    say: Callable[[str], None]
    replays: SharedReplays


class Measured(Protocol):
    """What came of one workload played by one arm."""

    def __len__(self) -> int:
        """How many requests were played, the warm-up included."""

    def rows(self) -> Iterator[dict[str, object]]:
        """Yield what there is to say of each request, in the order of the workload."""

    def total(self, cell: str, arm: Any, seed: int | None, warm_up: int) -> Run:
        """Add up all but the first `warm_up` requests."""


class Driver(Protocol):
    """Plays all arms of a test that have the same `driver_key`.

    It is made of the context and that key, and holds nothing that must be ended before `start`.
    """

    turn: Turn
    versions: dict[str, str]  # of the engines or servers that it has started, by name

    def start(self) -> None:
        """Get ready. Raises `SettingsError` if what it drives is not there."""

    def play(self, cell: Cell, arm: Any, seed: int) -> Measured:
        """Play the workload of a cell to its end. Raises `ArmError`: the arm is left out then."""

    def close(self) -> None:
        """End what `start` and `play` started; after that, and a second time, do nothing."""
