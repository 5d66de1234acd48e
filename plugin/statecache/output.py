"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

from statecache.errors import SettingsError, on_one_line

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["check_output", "whole_file"]


def check_output(flag: str, path: Path, keep: str | None = None) -> None:
    """Raise `SettingsError` naming `flag` if `path` cannot be written, before any work is done.

    `keep` names an input file that `path` must not replace.
    """
    target = Path(os.path.realpath(path))
    if keep is not None and target == Path(os.path.realpath(keep)):
        raise SettingsError(f"{flag}: {_shown(path)} is the trace itself: name another file")
    if target.is_dir():
        raise SettingsError(f"{flag}: {_shown(path)} is a directory: name a file")
    if not target.parent.is_dir():
        raise SettingsError(f"{flag}: there is no directory {_shown(target.parent)}: create it")
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise SettingsError(f"{flag}: {_shown(path)} is not writable: choose another place")


@contextmanager
def whole_file(flag: str, path: Path) -> Iterator[IO[bytes]]:
    """Open `path` for writing; it appears, in place of what was there, when the block ends well.

    After an error or an interrupt what was there is untouched. A device or a pipe is written
    directly. Raises `SettingsError` naming `flag`.
    """
    target = Path(os.path.realpath(path))
    direct = target.exists() and not target.is_file()
    part = target if direct else target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        try:
            with part.open("wb") as file:
                yield file
            if not direct:
                part.replace(target)
        finally:
            if not direct:
                part.unlink(missing_ok=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        reason = error.strerror or error
        raise SettingsError(f"{flag}: {_shown(path)} cannot be written ({reason})") from error


def _shown(path: Path) -> str:
    return on_one_line(str(path))
