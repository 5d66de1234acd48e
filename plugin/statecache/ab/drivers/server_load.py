"""When servers are asked: at the times of a workload, or session by session."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from statecache.ab.workloads import Asked

__all__ = ["at_their_times", "session_by_session"]


async def at_their_times(
    asked: Sequence[Asked], speed: float, ask: Callable[[int], Awaitable[None]]
) -> None:
    """Ask each at its time from the first one's on, answered or not; `ask` takes its number."""
    clock = asyncio.get_running_loop().time
    first = min(request.timestamp for request in asked)
    start = clock()

    async def in_time(number: int, request: Asked) -> None:
        due = start + (request.timestamp - first) / 1000 / speed
        await asyncio.sleep(max(0, due - clock()))
        await ask(number)

    await _together([in_time(number, request) for number, request in enumerate(asked)])


async def session_by_session(
    asked: Sequence[Asked], at_once: int, ask: Callable[[int], Awaitable[None]]
) -> None:
    """Let `at_once` sessions (0: all) each ask as soon as they are answered.

    The next one takes the place of one that ended.
    """
    by_session: dict[int | str | None, list[int]] = {}
    for number, request in enumerate(asked):
        by_session.setdefault(request.session_id, []).append(number)
    waiting = deque(by_session.values())

    async def place() -> None:
        while waiting:
            for number in waiting.popleft():
                await ask(number)

    await _together([place() for _ in range(min(at_once, len(waiting)) or len(waiting))])


async def _together(parts: Sequence[Awaitable[None]]) -> None:
    """Await all of them; the first error ends the others and is raised."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
