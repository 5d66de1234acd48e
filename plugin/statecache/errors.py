"""Errors that mean: the input, a setting or an engine is at fault, say so in one line and stop."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import NoReturn

__all__ = [
    "SeamError",
    "SettingsError",
    "Stopped",
    "TraceError",
    "escape_control_chars",
    "exit_engine",
    "group_by_reason",
]

_NAMED = 3


class SettingsError(ValueError):
    """A setting or an input file cannot be used. The message is one line and says what to do."""


class TraceError(SettingsError):
    """A trace cannot be read: the message names the file and, where known, line and field."""

    def __init__(self, source: str, problem: str, line: int | None = None) -> None:
        where = (
            escape_control_chars(source)
            if line is None
            else f"{escape_control_chars(source)}, line {line}"
        )
        super().__init__(f"{where}: {escape_control_chars(problem)}")
        self.source = source
        self.line = line


class SeamError(RuntimeError):
    """A seam is not as it was in the tested versions: nothing was installed."""


class Stopped(SystemExit):
    """What `exit_engine` raises: exit status 2, and the line that was written."""

    def __init__(self, line: str) -> None:
        super().__init__(line)
        self.code = 2


def exit_engine(problem: object) -> NoReturn:
    """Write `problem` to stderr and end the process of an engine with exit status 2.

    An engine would show a traceback of another error, and only log one that a plugin raises.
    """
    line = f"statecache: {problem}"
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
    raise Stopped(line)


def group_by_reason(states: Iterable[tuple[str, str]], where: str) -> list[tuple[str, str]]:
    """Return each reason with the names it holds for: three, how many more, and `where` to look.

    `states`: names and reasons. One cause, as a module that is not there, can have many names.
    """
    names: dict[str, list[str]] = {}
    for name, reason in states:
        names.setdefault(reason, []).append(name)
    return [(reason, _some(those, where)) for reason, those in names.items()]


def _some(names: list[str], where: str) -> str:
    shown = ", ".join(names[:_NAMED])
    more = len(names) - _NAMED
    return f"{shown} and {more} more ({where})" if more > 0 else shown


def escape_control_chars(text: str) -> str:
    """Return `text` with everything a terminal would not print as itself escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
