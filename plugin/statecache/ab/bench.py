"""Runs a test: every arm of every cell at every seed, interleaved, one driver for all."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Self

from statecache.ab.drivers.base import ArmError, Context, Driver, Measured, Turn
from statecache.ab.drivers.cache_layer import CacheLayerDriver
from statecache.ab.drivers.replay import ReplayDriver
from statecache.ab.drivers.trace_replay import SharedReplays
from statecache.ab.trial import Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from statecache.ab.arms import AnyArm
    from statecache.ab.results import Run
    from statecache.ab.trial import Cell, Trial

__all__ = ["DRIVERS", "Bench"]


def _server_driver(context: Context, _key: Hashable) -> Driver:
    from statecache.ab.drivers.servers import Servers  # needs what the extra `ab` brings

    return Servers(context)


# By the `driver` of an arm.
DRIVERS: dict[str, Callable[[Context, Hashable], Driver]] = {
    "replay": ReplayDriver,
    "cache_layer": CacheLayerDriver,
    "server": _server_driver,
}


class Bench:
    """Plays the runs of a test. A context: its engines and servers are up within it.

    Entering raises `SettingsError` if one of them is not there.
    """

    def __init__(
        self,
        trial: Trial,
        folder: Path = Path(),
        say: Callable[[str], None] = lambda _line: None,
    ) -> None:
        """Start nothing yet. Servers' logs go to `folder`; `say` hears what takes long."""
        self.failures: list[Failure] = []
        self._trial = trial
        self._context = Context(trial, folder, say, SharedReplays())
        self._drivers: dict[Hashable, Driver] = {}
        self._threads: dict[Hashable, ThreadPoolExecutor] = {}

    def __enter__(self) -> Self:
        arms = [arm for cell in self._trial.cells for arm in cell.arms]
        try:
            for arm in arms:
                if arm.driver_key not in self._drivers:
                    driver = DRIVERS[arm.driver](self._context, arm.driver_key)
                    self._drivers[arm.driver_key] = driver
            for driver in self._in_order():
                driver.start()  # known already: an interrupt finds what to end
            return self
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the engines and the servers."""
        with ExitStack() as stack:  # goes on where ending one of them fails or is interrupted
            for key, driver in self._drivers.items():
                if key in self._threads:
                    stack.callback(self._threads[key].shutdown, cancel_futures=True)
                stack.callback(driver.close)

    @property
    def versions(self) -> dict[str, str]:
        """Those of the engines and servers that were started, by name."""
        found: dict[str, str] = {}
        for driver in self._in_order():
            found |= driver.versions
        return found

    def _in_order(self) -> list[Driver]:
        """Return the drivers in the order of their first arms, those that play alone last."""
        return sorted(self._drivers.values(), key=lambda driver: driver.turn is Turn.ALONE)

    def runs(self) -> Iterator[tuple[Run, Measured]]:
        """Play the runs of all cells, seed by seed and arm by arm: A B A B."""
        for cell in self._trial.cells:
            for seed in self._trial.seeds(cell):
                arms = [arm for arm in cell.arms if self._goes_on(cell, arm)]
                together = [arm for arm in arms if self._turn(arm) is not Turn.ALONE]
                played = self._play_together(cell, seed, together)
                yield from self._collected(cell, seed, together, played)
                for arm in arms:
                    if self._turn(arm) is Turn.ALONE:
                        played = {arm.name: self._played(cell, arm, seed)}
                        yield from self._collected(cell, seed, [arm], played)

    def _collected(
        self, cell: Cell, seed: int, arms: Sequence[AnyArm], played: dict[str, Future[Measured]]
    ) -> Iterator[tuple[Run, Measured]]:
        """Add up each arm's run, in the order of the arms; note those that failed."""
        for arm in arms:
            try:
                measured = played[arm.name].result()
            except ArmError as error:
                self.failures.append(Failure(cell.name, arm.name, str(error)))
                continue
            warm_up = int(self._trial.warm_up * len(measured))
            yield measured.total(cell.name, arm, seed if cell.seeded else None, warm_up), measured

    def _play_together(
        self, cell: Cell, seed: int, arms: Sequence[AnyArm]
    ) -> dict[str, Future[Measured]]:
        """Play each arm once, one of each driver at a time; engines and the replay side by side."""
        played: dict[str, Future[Measured]] = {}
        for arm in arms:
            if self._turn(arm) is Turn.IN_BACKGROUND:
                driver, key = self._drivers[arm.driver_key], arm.driver_key
                thread = self._threads.setdefault(key, ThreadPoolExecutor(max_workers=1))
                played[arm.name] = thread.submit(driver.play, cell, arm, seed)
        for arm in arms:
            if self._turn(arm) is Turn.IN_TURN:
                played[arm.name] = self._played(cell, arm, seed)
        return played

    def _played(self, cell: Cell, arm: AnyArm, seed: int) -> Future[Measured]:
        """Play an arm here and now."""
        played: Future[Measured] = Future()
        try:
            played.set_result(self._drivers[arm.driver_key].play(cell, arm, seed))
        except ArmError as error:
            played.set_exception(error)
        return played

    def _turn(self, arm: AnyArm) -> Turn:
        return self._drivers[arm.driver_key].turn

    def _goes_on(self, cell: Cell, arm: AnyArm) -> bool:
        return all((failed.cell, failed.arm) != (cell.name, arm.name) for failed in self.failures)
