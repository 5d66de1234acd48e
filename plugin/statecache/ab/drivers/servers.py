"""The servers of a test: all up at once, or one at a time."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, cast
from urllib.parse import quote

from statecache.ab.drivers.base import ArmError, Turn
from statecache.ab.drivers.server import Server, question_tokens
from statecache.ab.server_arm import ServerSettings
from statecache.errors import SettingsError

if TYPE_CHECKING:
    from statecache.ab.drivers.base import Context
    from statecache.ab.server_arm import ServerArm
    from statecache.ab.server_results import Answers
    from statecache.ab.trial import Cell, Trial

__all__ = ["Servers"]


class Servers:
    """The driver `server`: starts the servers of a test in turn, and plays runs on them.

    `close` ends those that were launched.
    """

    turn = Turn.ALONE  # servers may share a machine

    def __init__(self, context: Context) -> None:
        """Start nothing yet."""
        self._trial, self._folder, self._say = context.trial, context.folder, context.say
        trial = context.trial
        self.versions: dict[str, str] = {}
        self._settings = trial.servers or ServerSettings()
        self._servers: dict[tuple[str, str], Server] = {}
        self._longest: dict[str, int] = {}
        self._tells_ids: dict[tuple[str, str], bool] = {}
        self._answers: dict[str, bool] = {}  # by cell: whether they stand in the next prompts
        self._stack = ExitStack()  # goes on where ending one of them fails or is interrupted

    def start(self) -> None:
        """Start them. Raises `SettingsError` if one cannot be used."""
        try:
            for cell in self._trial.cells:
                arms = _servers_of(cell)
                if arms:
                    self._longest[cell.name], milliseconds = self._measured(cell, self._trial)
                for place, arm in enumerate(arms):
                    # Arms on one server must not find each other's prompts in its cache.
                    earlier = [other.url for other in arms[:place]]
                    same = earlier.count(arm.url) if arm.url else 0
                    self._start(cell, arm, f"{same}")
                self._answers[cell.name] = self._feeds(cell, arms)
                if arms and cell.workload.loop == "open":
                    speed = self._settings.speed
                    self._say(
                        f"{cell.name}: {milliseconds / 1000 / speed:,.0f} s a run, speed {speed:g}"
                    )
        except BaseException:
            self.close()
            raise

    def play(self, cell: Cell, arm: ServerArm, seed: int) -> Answers:
        """Ask the workload of a cell. Raises `ArmError`."""
        server = self._servers[cell.name, arm.name]
        if server.served is None:
            try:
                server.start(self._longest[cell.name])
            except SettingsError as error:
                raise ArmError(str(error)) from error
        try:
            asked = cell.workload.asked(seed)
            return server.play(cell.workload, asked, seed, answers=self._answers[cell.name])
        finally:
            if self._settings.one_at_a_time:
                server.close()

    def close(self) -> None:
        """End those that were launched."""
        self._stack.close()

    def _start(self, cell: Cell, arm: ServerArm, salt: str) -> None:
        log = self._folder / f"server-{quote(arm.name, safe=' ')}.log"
        try:
            log.unlink(missing_ok=True)
        except OSError as error:
            raise arm.error(f"{log} cannot be written ({error.strerror})") from error
        server = self._servers[cell.name, arm.name] = Server(arm, self._settings, log, salt)
        self._stack.callback(server.close)
        began = time.monotonic()
        server.start(self._longest[cell.name])
        served = server.served
        if served is not None:
            self._tells_ids[cell.name, arm.name] = served.tells_ids
            self.versions[arm.name] = served.server
            self._say(
                f"arm {arm.name}: {served.server}, model {served.name},"
                f" ready after {time.monotonic() - began:.0f} s"
            )
        if self._settings.one_at_a_time:
            server.close()

    def _feeds(self, cell: Cell, arms: list[ServerArm]) -> bool:
        """Whether answers stand in the next prompts of their sessions: for all arms or for none."""
        if not arms or cell.workload.loop == "open" or not self._settings.answers_in_prompts:
            return False
        silent = [arm.name for arm in arms if not self._tells_ids[cell.name, arm.name]]
        if silent:
            self._say(
                f"{cell.name}: no answers in the next prompts: {', '.join(silent)} tells no ids"
            )
        return not silent

    def _measured(self, cell: Cell, trial: Trial) -> tuple[int, float]:
        """Return the tokens of the longest request with its answer, and how long a run takes.

        That is in milliseconds of the workload. Raises `SettingsError` if it has no times.
        """
        longest, milliseconds = 0, 0.0
        for seed in trial.seeds(cell) if cell.workload.seeded else [trial.seed]:
            asked = cell.workload.asked(seed)
            lengths = [sum(question_tokens(request, self._settings)) for request in asked]
            longest = max(longest, *lengths)
            times = [request.timestamp for request in asked]
            milliseconds = max(milliseconds, max(times) - min(times))
        if cell.workload.loop == "open" and milliseconds == 0:
            raise SettingsError(
                "workload: an open loop needs timestamps, and all are the same: set loop=closed"
            )
        return longest, milliseconds


def _servers_of(cell: Cell) -> list[ServerArm]:
    return cast("list[ServerArm]", [arm for arm in cell.arms if arm.driver == "server"])
