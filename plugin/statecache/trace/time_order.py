"""Requests from any source, as lines of a trace in the order of their times."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

import msgspec

from statecache.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["TraceLine", "in_time_order"]


class TraceLine(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A line of a trace: see `format.Request`. `session_id` says which requests belong together."""

    timestamp: int | float
    input_length: int
    output_length: int
    hash_ids: list[int]
    session_id: int | str | None = None


def in_time_order(lines: Iterable[TraceLine]) -> Iterator[bytes]:
    """Yield `lines` as JSON, sorted by time; those of one time keep their order.

    They wait in a temporary file: memory holds their times and places alone. Nothing is yielded
    before all were read. Raises `SettingsError` when the file cannot be written.
    """
    try:
        with tempfile.TemporaryFile() as waiting:
            places = []
            for number, line in enumerate(lines):
                places.append((line.timestamp, number, waiting.tell()))
                waiting.write(msgspec.json.encode(line) + b"\n")
            places.sort()
            for _timestamp, _number, offset in places:
                waiting.seek(offset)
                yield waiting.readline()
    except OSError as error:
        problem = f"a temporary file cannot be written ({error.strerror or error})"
        raise SettingsError(f"{problem}: set TMPDIR to a folder with room") from error
