"""What commands share: files that are written whole or not at all, tables, progress, old names."""

from __future__ import annotations

import gzip
import os
import stat
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

from rich.console import Console
from rich.progress import Progress

from statecache.errors import SettingsError, escape_control_chars

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

__all__ = [
    "check_new_output",
    "check_output",
    "check_outputs",
    "say_renamed",
    "shown_progress",
    "split_at_commas",
    "table_console",
    "whole_file",
    "write_lines",
]

_Item = TypeVar("_Item")


def shown_progress(
    label: str, items: Iterable[_Item], total: int, size: Callable[[_Item], int] = lambda _item: 1
) -> Iterator[_Item]:
    """Yield the items, and show on a terminal's stderr how much of `total` they come to."""
    errors = Console(stderr=True)
    hidden = not sys.stderr.isatty()  # the console believes FORCE_COLOR instead
    with Progress(console=errors, transient=True, disable=hidden) as progress:
        task = progress.add_task(label, total=total)
        for item in items:
            yield item
            progress.advance(task, size(item))


def table_console() -> Console:
    """Return the console of stdout: each row is one line, uncut, however narrow the terminal."""
    return Console(width=1_000, color_system="auto" if sys.stdout.isatty() else None)


def say_renamed(old: str, new: str) -> None:
    """Say on stderr that a name was given that goes with the next release."""
    sys.stderr.write(f"statecache: {old} is now {new}; the old name goes with the next release\n")


def split_at_commas(values: Iterable[str]) -> list[str]:
    """Return the parts of each value between commas, without what comes again."""
    return list(dict.fromkeys(part.strip() for value in values for part in value.split(",")))


def check_outputs(outputs: Mapping[str, Path | None], source: str | None = None) -> None:
    """As `check_output`, of every flag that names a file; and no two may name the same one."""
    flags: dict[int | str, str] = {}
    for flag, path in outputs.items():
        if path:
            check_output(flag, path, source)
            first = flags.setdefault(_stream(path) or os.path.realpath(path), flag)
            if first != flag:
                raise SettingsError(f"{flag}: names the same file as {first}: name another")


def check_output(flag: str, path: Path, trace: str | None = None) -> None:
    """Raise `SettingsError` naming `flag` if `path` cannot be written, before any work is done.

    `trace` names the input file that `path` must not replace, "-" for stdin.
    """
    with _named(flag, path):
        found = _stat(path)
        if found and stat.S_ISDIR(found.st_mode):
            raise SettingsError(f"{flag}: {_shown(path)} is a directory: name a file")
        if found and stat.S_ISREG(found.st_mode):
            if trace is not None and _is_trace(found, trace):
                raise SettingsError(
                    f"{flag}: {_shown(path)} is the input itself: name another file"
                )
            os.close(os.open(path, os.O_WRONLY))
        if _stream(path) or _is_direct(path):
            return
        target = Path(os.path.realpath(path))
        if not target.parent.is_dir():
            raise SettingsError(f"{flag}: there is no directory {_shown(target.parent)}: create it")
        part = _part_of(target)
        try:
            part.touch()
        finally:  # also when a signal ends the command here
            part.unlink(missing_ok=True)


def check_new_output(flag: str, path: Path, trace: str | None = None) -> None:
    """As `check_output`; a file that is there already is not replaced, unless it is a stream."""
    check_output(flag, path, trace)
    with _named(flag, path):
        if _stat(path) and not _stream(path) and not _is_direct(path):
            raise SettingsError(f"{flag}: {_shown(path)} is there already: name another file")


def write_lines(flag: str, path: Path, lines: Iterable[bytes]) -> None:
    """Write `lines` as one whole file, packed if the name ends in .gz: the same bytes each time."""
    with whole_file(flag, path) as file:
        if path.suffix.lower() == ".gz":
            with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed:
                packed.writelines(lines)
        else:
            file.writelines(lines)


@contextmanager
def whole_file(flag: str, path: Path) -> Iterator[IO[bytes]]:
    """Open `path` for writing; it appears, in place of what was there, when the block ends well.

    After an error or an interrupt what was there is untouched; its mode is kept. A device, a pipe,
    or what stdout or stderr already go to is written directly, "-" to stdout. Raises
    `SettingsError` naming `flag`.
    """
    with _named(flag, path):
        if stream := _stream(path):
            with os.fdopen(os.dup(stream), "wb") as file:
                yield file
        elif _is_direct(path):
            with path.open("wb") as file:
                yield file
        else:
            with _replacing(Path(os.path.realpath(path))) as file:
                yield file


@contextmanager
def _replacing(target: Path) -> Iterator[IO[bytes]]:
    part = _part_of(target)
    try:
        with part.open("wb") as file:
            if earlier := _stat(target):
                os.fchmod(file.fileno(), stat.S_IMODE(earlier.st_mode))
            yield file
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def _named(flag: str, path: Path) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        reason = error.strerror or error
        raise SettingsError(f"{flag}: {_shown(path)} cannot be written ({reason})") from error


def _part_of(target: Path) -> Path:
    """Return where `target` is written first; short, since a name may be as long as is allowed."""
    return target.with_name(f".{os.getpid()}.part")


def _stream(path: Path) -> int:
    """Return 1 or 2 if what stdout or stderr go to is `path`, else 0.

    To open it once more would write it from its start, over what the stream writes.
    """
    if str(path) == "-":
        return 1
    found = _stat(path)
    return next((n for n in (1, 2) if found and os.path.samestat(found, os.fstat(n))), 0)


def _is_direct(path: Path) -> bool:
    """Whether `path` is there and must be opened by its own name: no plain file, or a link to one.

    The links of /proc, where /dev/fd leads too, name what is open and may not be resolved.
    """
    found = _stat(path)
    if found is None:
        return False
    folder = Path(os.path.realpath(path.parent))
    is_open_file = folder == Path("/dev") or Path("/proc") in (folder, *folder.parents)
    return is_open_file or not stat.S_ISREG(found.st_mode)


def _is_trace(found: os.stat_result, trace: str) -> bool:
    with suppress(OSError, ValueError):  # the trace's own fault, said when it is read
        return os.path.samestat(found, os.fstat(0) if trace == "-" else Path(trace).stat())
    return False


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _shown(path: Path) -> str:
    return escape_control_chars(str(path))
