"""What a test runs: cells of a workload and the arms that play it, and how often."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from statecache.ab.statistics import Pair

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statecache.ab.arms import AnyArm
    from statecache.ab.server_arm import ServerSettings
    from statecache.ab.workloads import Workload

__all__ = ["Cell", "Failure", "Trial"]


class Cell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A workload and the arms that play it; `at` is its place on the axis of a plot."""

    name: str
    workload: Workload
    arms: Sequence[AnyArm]
    at: float | None = None

    @property
    def seeded(self) -> bool:
        """Whether another seed gives another workload, or other tokens to one of the arms."""
        return self.workload.seeded or any(arm.seeds_tokens for arm in self.arms)

    @property
    def pairs(self) -> list[Pair]:
        """Each arm with the one it is compared with."""
        first = self.arms[0].name
        return [
            Pair(self.name, arm.baseline or first, arm.name)
            for arm in self.arms
            if arm.name != (arm.baseline or first)
        ]

    @property
    def timed_pairs(self) -> int:
        """How many of the pairs have times to compare too: both arms are timed."""
        timed = {arm.name for arm in self.arms if arm.timed}
        return sum({pair.baseline, pair.arm} <= timed for pair in self.pairs)


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be run. The first `warm_up` part of each workload is played and not counted.

    `axis` names what the cells differ in; `notes` is what a reader of the report must know.
    """

    name: str
    cells: list[Cell]
    repeats: int
    seed: int = 0
    warm_up: float = 0.1
    axis: str = ""
    notes: list[str] = []
    servers: ServerSettings | None = None

    @property
    def pairs(self) -> list[Pair]:
        """Every comparison, in the order of the cells."""
        return [pair for cell in self.cells for pair in cell.pairs]

    @property
    def runs(self) -> int:
        """How many runs there are."""
        return sum(len(cell.arms) * len(self.seeds(cell)) for cell in self.cells)

    def without_keys(self) -> Trial:
        """Return the test as it may be shown to others."""
        cells = [
            msgspec.structs.replace(cell, arms=[arm.without_keys() for arm in cell.arms])
            for cell in self.cells
        ]
        return msgspec.structs.replace(self, cells=cells)

    def seeds(self, cell: Cell) -> list[int]:
        """Return the seeds of a cell: one where another would not change the workload."""
        repeats = self.repeats if cell.seeded else 1
        return list(range(self.seed, self.seed + repeats))


class Failure(msgspec.Struct, frozen=True):
    """An arm that could not be played, and why; it is left out from there on."""

    cell: str
    arm: str
    reason: str
