"""Runs a test: every arm of every cell at every seed, interleaved, one driver for all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec

from statecache.ab.arms import Arm
from statecache.ab.drivers.cache_layer import ArmError, EngineProcess
from statecache.ab.drivers.replay import CoreDriver
from statecache.ab.results import Played, Run, run_of
from statecache.ab.server_arm import ServerArm, ServerSettings
from statecache.ab.server_results import Answers, server_run
from statecache.ab.statistics import Pair
from statecache.ab.workloads import Workload
from statecache.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from statecache.ab.drivers.servers import Servers

__all__ = ["Bench", "Cell", "Failure", "Trial"]


class Cell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A workload and the arms that play it; `at` is its place on the axis of a plot."""

    name: str
    workload: Workload
    arms: Sequence[Arm | ServerArm]
    at: float | None = None

    @property
    def seeded(self) -> bool:
        """Whether another seed gives another workload, or other tokens to a server."""
        return self.workload.seeded or any(isinstance(arm, ServerArm) for arm in self.arms)

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
    def server_pairs(self) -> int:
        """How many of the pairs are two servers."""
        servers = {arm.name for arm in self.arms if isinstance(arm, ServerArm)}
        return sum({pair.baseline, pair.arm} <= servers for pair in self.pairs)


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
            msgspec.structs.replace(
                cell,
                arms=[a.without_keys() if isinstance(a, ServerArm) else a for a in cell.arms],
            )
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
        """Start nothing yet. Servers' logs go to `folder`; `say` is told what takes long."""
        self.failures: list[Failure] = []
        self.versions: dict[str, str] = {}
        self._trial = trial
        self._folder, self._say = folder, say
        self._engines: dict[tuple[str, str | None], EngineProcess] = {}
        self._last: tuple[Workload, int, CoreDriver] | None = None
        self._pool = ThreadPoolExecutor(max_workers=4)
        self._servers: Servers | None = None
        self._closed = False

    def __enter__(self) -> Self:
        arms = [arm for cell in self._trial.cells for arm in cell.arms]
        try:
            for arm in arms:
                if isinstance(arm, Arm) and arm.driver == "cache":
                    self._engine(arm)
            if any(isinstance(arm, ServerArm) for arm in arms):
                from statecache.ab.drivers.servers import Servers

                self._servers = Servers(self._trial, self._folder, self._say)
                self._servers.start()  # known already: an interrupt finds what to end
                self.versions |= self._servers.versions
            return self
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the engines and the servers."""
        self._closed = True
        try:
            for engine in self._engines.values():
                engine.close()
            self._pool.shutdown(cancel_futures=True)
        finally:
            if self._servers is not None:
                self._servers.close()

    def runs(self) -> Iterator[tuple[Run, Played | Answers]]:
        """Play the runs of all cells, seed by seed and arm by arm: A B A B."""
        for cell in self._trial.cells:
            for seed in self._trial.seeds(cell):
                if any(isinstance(arm, Arm) for arm in cell.arms):
                    core = self._core(cell.workload, seed)
                    warm_up = int(self._trial.warm_up * len(core.prompts))
                    for arm, played in self._play_all(cell, core):
                        seen = seed if cell.seeded else None
                        run = run_of(cell.name, arm, seen, played, warm_up, arm.cost_model())
                        yield run, played
                yield from self._server_runs(cell, seed)

    def _server_runs(self, cell: Cell, seed: int) -> Iterator[tuple[Run, Answers]]:
        """Ask the servers one after the other: they may share a machine."""
        for arm in cell.arms:
            if isinstance(arm, ServerArm) and self._servers and self._goes_on(cell, arm.name):
                try:
                    answers = self._servers.play(cell, arm, seed)
                except ArmError as error:
                    self.failures.append(Failure(cell.name, arm.name, str(error)))
                else:
                    warm_up = int(self._trial.warm_up * len(answers.answered))
                    yield server_run(cell.name, arm.name, seed, answers, warm_up), answers

    def _goes_on(self, cell: Cell, arm: str) -> bool:
        return all((one.cell, one.arm) != (cell.name, arm) for one in self.failures)

    def _play_all(self, cell: Cell, core: CoreDriver) -> Iterator[tuple[Arm, Played]]:
        """Play each arm once; engines and the replay work side by side, results come in order."""
        arms = [arm for arm in cell.arms if isinstance(arm, Arm) and self._goes_on(cell, arm.name)]
        by_engine: dict[tuple[str, str | None], list[Arm]] = {}
        for arm in arms:
            if arm.driver == "cache":
                by_engine.setdefault((arm.engine, arm.python), []).append(arm)
        waiting = [
            self._pool.submit(self._play_each, group, core.prompts) for group in by_engine.values()
        ]
        played: dict[str, Played | ArmError] = {
            arm.name: core.play(arm) for arm in arms if arm.driver == "core"
        }
        for one in waiting:
            played |= one.result()
        for arm in arms:
            found = played[arm.name]
            if isinstance(found, ArmError):
                self.failures.append(Failure(cell.name, arm.name, str(found)))
            else:
                yield arm, found

    def _core(self, workload: Workload, seed: int) -> CoreDriver:
        """Return the driver of a workload; cells that follow each other may share it."""
        if self._last is None or self._last[:2] != (workload, seed):
            self._last = (workload, seed, CoreDriver(workload.trace(seed)))
        return self._last[2]

    def _play_each(
        self, arms: Sequence[Arm], prompts: list[list[int]]
    ) -> dict[str, Played | ArmError]:
        played: dict[str, Played | ArmError] = {}
        for arm in arms:
            if self._closed:  # interrupted: no engine is started in the place of one that was ended
                break
            try:
                played[arm.name] = self._engine(arm).play(arm, prompts)
            except ArmError as error:
                played[arm.name] = error
            except SettingsError as error:  # it had to be started again, and could not be
                played[arm.name] = ArmError(str(error))
        return played

    def _engine(self, arm: Arm) -> EngineProcess:
        key = (arm.engine, arm.python)
        engine = self._engines.get(key)
        if engine is None or not engine.alive:
            if engine is not None:
                engine.close()
            engine = self._engines[key] = EngineProcess(arm.engine, arm.python)
            self.versions[arm.engine] = engine.version
        return engine
