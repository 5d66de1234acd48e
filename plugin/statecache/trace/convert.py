"""Public traces, converted to the project's trace format."""

from __future__ import annotations

import codecs
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

import msgspec

from statecache.errors import TraceError
from statecache.trace.format import (
    BLOCK_TOKENS,
    MAX_LINE_BYTES,
    Request,
    decode_line,
    described,
    opened,
)
from statecache.trace.kv_cache_tester import Conversation, ConversationConverter
from statecache.trace.time_order import TraceLine, in_time_order

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["FORMATS", "MAX_CONVERSATION_BYTES", "PUBLISHED", "conversation_files", "trace_lines"]

FORMATS = ("auto", "kv-cache-tester", "mooncake")
MAX_CONVERSATION_BYTES = 4 * MAX_LINE_BYTES
_SUFFIXES = (".json", ".json.gz")
_Kind = TypeVar("_Kind")


class Published(msgspec.Struct, frozen=True):
    """What the published tables are of: the start of each source.

    Of kv-cache-tester's folder, the first `conversations` of under `file_bytes`, in the order of
    their names; of Mooncake's trace the first `requests`.
    """

    conversations: int = 100
    file_bytes: int = 900_000
    requests: int = 6_000


PUBLISHED = Published()


class _Shape(msgspec.Struct, frozen=True):
    """The fields that tell the formats apart."""

    requests: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    hash_ids: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET

    @property
    def source_format(self) -> str | None:
        """The format of a JSON object with these fields, None for one of neither."""
        if self.requests is not msgspec.UNSET:
            return "kv-cache-tester"
        return None if self.hash_ids is msgspec.UNSET else "mooncake"


class _MooncakeRequest(Request, frozen=True, gc=False):
    session_id: int | str | None = None  # of a trace that has been converted before


def trace_lines(
    source: str,
    *,
    source_format: str = "auto",
    published: bool = False,
    stdin: BinaryIO | None = None,
) -> Iterator[bytes]:
    """Yield the requests of `source` as lines of a trace, sorted by time.

    `source` is a folder of conversations of kv-cache-tester, one of them, or a trace of Mooncake;
    files may be packed with gzip, and "-" is stdin. `source_format` is one of `FORMATS`; with auto
    the content tells which.
    `published` selects and times requests as for the published tables. All of `source` is read
    before the first line is yielded. Raises `TraceError`.
    """
    if source != "-" and Path(source).is_dir():
        if source_format == "mooncake":
            raise TraceError(source, "is a folder: a trace of Mooncake is one file")
        requests = _of_folder(source, published=published)
    else:
        requests = _of_file(source, source_format, stdin, published=published)
    return in_time_order(_with_a_whole_block(source, requests))


def conversation_files(folder: str, *, published: bool = False) -> list[Path]:
    """Return the files of `folder` that are converted, in that order. Raises `TraceError`."""
    try:
        found = sorted(p for p in Path(folder).iterdir() if p.name.endswith(_SUFFIXES))
        if not published or not found:
            chosen = found
        else:
            small = (p for p in found if p.stat().st_size < PUBLISHED.file_bytes)
            chosen = list(islice(small, PUBLISHED.conversations))
    except OSError as error:
        raise TraceError(folder, f"cannot be read ({error.strerror or error})") from error
    if not found:
        problem = "has no conversation (*.json): of a clone of kv-cache-tester name its folder"
        raise TraceError(folder, f"{problem} traces")
    if published and len(chosen) < PUBLISHED.conversations:
        problem = f"has {len(chosen)} conversations of under {PUBLISHED.file_bytes:,} bytes"
        raise TraceError(folder, f"{problem}, the published tables need {PUBLISHED.conversations}")
    return chosen


def _of_folder(folder: str, *, published: bool) -> Iterator[TraceLine]:
    converter = ConversationConverter(published=published)
    for file in conversation_files(folder, published=published):
        with opened(str(file)) as stored:
            content = _whole(stored.name, stored.lines())
        yield from converter.requests(stored.name, _conversation(stored.name, content))


def _of_file(
    source: str, source_format: str, stdin: BinaryIO | None, *, published: bool
) -> Iterator[TraceLine]:
    with opened(source, stdin) as stored:
        lines = stored.lines()
        read = list(islice(lines, 1))
        if source_format == "auto":
            source_format, read = _told_format(stored.name, read, lines)
        if source_format == "mooncake":
            yield from _of_mooncake(stored.name, chain(read, lines), published=published)
            return
        if published:
            problem = "is one conversation: the published tables need the folder it is of"
            raise TraceError(stored.name, problem)
        content = _whole(stored.name, chain(read, lines))
        yield from ConversationConverter().requests(
            stored.name, _conversation(stored.name, content)
        )


def _of_mooncake(
    name: str, lines: Iterable[tuple[int, bytes]], *, published: bool
) -> Iterator[TraceLine]:
    decoder = msgspec.json.Decoder(_MooncakeRequest)
    number = 0
    for number, line in islice(lines, PUBLISHED.requests if published else None):
        request = decode_line(name, number, line, decoder)
        yield TraceLine(**msgspec.structs.asdict(request))
    if published and number < PUBLISHED.requests:
        problem = f"has {number} requests, the published tables need {PUBLISHED.requests}"
        raise TraceError(name, problem)


def _told_format(
    name: str, read: list[tuple[int, bytes]], lines: Iterator[tuple[int, bytes]]
) -> tuple[str, list[tuple[int, bytes]]]:
    """Return the format that the first JSON object is of, and all lines that were read to tell.

    Where the first line is no JSON in itself, the object may be the whole file, over many lines.
    """
    if not read:
        raise TraceError(name, "is empty")
    if read[0][1].startswith(codecs.BOM_UTF8):
        raise TraceError(name, "starts with a byte order mark: save it without")
    try:
        found = msgspec.json.decode(read[0][1], type=_Shape).source_format
    except msgspec.ValidationError:
        found = None
    except (msgspec.DecodeError, RecursionError):
        found = None
        if read[0][1].lstrip().startswith(b"{"):
            read = [(1, _whole(name, chain(read, lines)))]
            found = _decoded(name, read[0][1], _Shape).source_format
    if found is None:
        problem = "is of no known format: give conversations of kv-cache-tester or a trace of"
        raise TraceError(name, f"{problem} Mooncake")
    return found, read


def _whole(name: str, lines: Iterable[tuple[int, bytes]]) -> bytes:
    """Return all lines as one, which may be as long as a conversation."""
    read = bytearray()
    for _number, line in lines:
        read += line
        if len(read) > MAX_CONVERSATION_BYTES:
            raise TraceError(name, f"is longer than {MAX_CONVERSATION_BYTES} bytes")
    return bytes(read)


def _conversation(name: str, content: bytes) -> Conversation:
    if not content.strip():
        raise TraceError(name, "is empty")
    return _decoded(name, content, Conversation)


def _decoded(name: str, content: bytes, kind: type[_Kind]) -> _Kind:
    try:
        content.decode()  # the decoder does not look into strings it skips
        return msgspec.json.decode(content, type=kind)
    except UnicodeDecodeError as error:
        raise TraceError(name, f"is not UTF-8 (byte {error.start + 1})") from error
    except RecursionError as error:
        raise TraceError(name, "is nested too deeply") from error
    except msgspec.ValidationError as error:
        raise TraceError(name, described(str(error))) from error
    except msgspec.DecodeError as error:
        raise TraceError(name, f"is not a JSON object ({error})") from error


def _with_a_whole_block(source: str, requests: Iterable[TraceLine]) -> Iterator[TraceLine]:
    """Pass `requests` on; raise `TraceError` when no prompt has a block that could be reused."""
    is_usable = False
    for request in requests:
        is_usable = is_usable or request.input_length >= BLOCK_TOKENS
        yield request
    if not is_usable:
        name = "stdin" if source == "-" else source
        raise TraceError(name, f"has no request of a whole block of {BLOCK_TOKENS} tokens")
