"""What ends a command from outside, and how it waits for what must not be done by halves."""

from __future__ import annotations

import signal
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ignore_interrupts", "interrupts_put_off"]

_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def ignore_interrupts() -> None:
    """Let what was measured be written in peace."""
    for number in _INTERRUPTS:
        with suppress(ValueError):  # not in the main thread
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def interrupts_put_off() -> Iterator[None]:
    """Let something be done whole, or not begun: what interrupts comes afterwards."""
    came: list[int] = []
    before: dict[signal.Signals, Any] = {}
    try:
        with suppress(ValueError):  # not in the main thread
            for number in _INTERRUPTS:
                before[number] = signal.signal(number, lambda number, _frame: came.append(number))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for interrupt in came:
            signal.raise_signal(interrupt)
