"""Errors that mean: the input or a setting is at fault, say so in one line and stop."""

from __future__ import annotations

__all__ = ["SettingsError", "TraceError", "on_one_line"]


class SettingsError(ValueError):
    """A setting or an input file cannot be used. The message is one line and says what to do."""


class TraceError(SettingsError):
    """A trace cannot be read: the message names the file and, where known, line and field."""

    def __init__(self, source: str, problem: str, line: int | None = None) -> None:
        where = on_one_line(source) if line is None else f"{on_one_line(source)}, line {line}"
        super().__init__(f"{where}: {on_one_line(problem)}")
        self.source = source
        self.line = line


def on_one_line(text: str) -> str:
    """Return `text` with everything a terminal would not print as itself escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
