"""The file of a recording: one that nothing is lost from, within the size that was asked for.

Each recording has a file of its own: where FILE.jsonl is there, a restarted server writes to
FILE.2.jsonl, the next one to FILE.3.jsonl. Nothing is overwritten, and nothing appended: ids are
hashes under a key that ends with its recording, so two of them in one file would share prompts that
never were the same. All these files together keep to that size.
"""

from __future__ import annotations

import fcntl
import gzip
import itertools
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from statecache.engine.settings import flag_of
from statecache.errors import SettingsError, escape_control_chars

__all__ = ["FullError", "RecordFile", "check_record_file"]


def check_record_file(path: str) -> None:
    """Raise `SettingsError` unless a recording can begin at `path`, or numbered beside it.

    A device (/dev/null) is written to as it is.
    """
    flag, shown = flag_of("record"), escape_control_chars(path)
    try:
        there = Path(path).stat()
    except FileNotFoundError:
        there = None
    except (OSError, ValueError) as error:
        raise SettingsError(f"{flag}: {shown} cannot be written ({error})") from error
    if there is not None and stat.S_ISCHR(there.st_mode):
        return
    if there is not None and not stat.S_ISREG(there.st_mode):
        raise SettingsError(f"{flag}: {shown} is there and no file: name another one")
    folder = Path(path).parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise SettingsError(
            f"{flag}: {escape_control_chars(str(folder))} is no directory to write to"
        )


def _names(path: str) -> Iterator[str]:
    """Yield `path`, then the same with 2, 3, ... before its endings."""
    yield path
    folder, name = os.path.split(path)
    stem, dot, endings = (name, "", "") if name.startswith(".") else name.partition(".")
    for number in itertools.count(2):
        yield os.path.join(folder, f"{stem}.{number}{dot}{endings}")  # noqa: PTH118 - as given


def _opened(path: str) -> tuple[int, str, int]:
    """Open the first of `_names` that is free: not there, or empty and nobody's.

    Returns it, its name, and the bytes of those that are not free. Raises `OSError`.
    """
    taken = 0
    for name in _names(path):
        try:
            file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o600)
        except OSError:
            if not Path(name).exists():
                raise
            continue  # no file, or nobody may write to it
        try:
            there = os.fstat(file)
            if stat.S_ISCHR(there.st_mode):
                return file, name, 0
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed
            if there.st_size == 0:
                return file, name, taken
        except OSError:  # another server records there
            pass
        os.close(file)
        taken += there.st_size
    raise AssertionError("there is always one more name")


class FullError(Exception):
    """The file has reached its size."""


class RecordFile:
    """Appends whole lines. What is written by one call is there as a whole, or nothing of it is.

    With .gz each call makes a gzip member of its own, so that the file is sound at any time. The
    earlier recordings beside it count in `most_bytes`.
    """

    def __init__(self, path: str, most_bytes: int) -> None:
        check_record_file(path)
        try:
            self._file, self.name, self.taken = _opened(path)
        except OSError as error:
            what = f"{flag_of('record')}: {escape_control_chars(path)} cannot be written"
            raise SettingsError(f"{what} ({error.strerror})") from error
        self._packed = path.lower().endswith(".gz")
        self._most_bytes = most_bytes - self.taken
        self._bytes = 0

    def append(self, lines: list[bytes]) -> int:
        """Write `lines`, return how many. Raises `FullError` once not all fit, and `OSError`."""
        fitting = lines
        data = self._pack(fitting)
        while fitting and self._bytes + len(data) > self._most_bytes:
            fitting = fitting[: len(fitting) // 2]
            data = self._pack(fitting)
        if fitting:
            self._write(data)
        if len(fitting) < len(lines):
            raise FullError
        return len(lines)

    def close(self) -> None:
        """Let another server have the name."""
        os.close(self._file)

    def _pack(self, lines: list[bytes]) -> bytes:
        joined = b"".join(lines)
        return gzip.compress(joined, 6, mtime=0) if self._packed else joined

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError:
            if len(left) < len(data):
                os.ftruncate(self._file, self._bytes)
            raise
        self._bytes += len(data)
