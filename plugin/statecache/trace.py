"""Recorded workloads: Mooncake-style JSON lines, plain or gzip."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import sys
import zlib
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, BinaryIO

import msgspec

from statecache.errors import SettingsError, TraceError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["BLOCK_TOKENS", "MAX_IDS", "MAX_LINE_BYTES", "Request", "Trace", "read_trace"]

BLOCK_TOKENS = 512
MAX_LINE_BYTES = 64 * 2**20
MAX_IDS = 2**22  # of a prompt of 2^31 tokens

# A packed file that unpacks to more than this is refused beyond this ratio: traces reach 5 to 20.
_PACKED_FREELY = 256 * 2**20
_MAX_RATIO = 100

_GZIP_MAGIC = b"\x1f\x8b"

_Time = msgspec.Meta(ge=0, le=2**53)  # what a float holds exactly
Milliseconds = Annotated[int, _Time] | Annotated[float, _Time]
Length = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
BlockId = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
BlockIds = Annotated[list[BlockId], msgspec.Meta(max_length=MAX_IDS)]


class Request(msgspec.Struct, frozen=True, gc=False):
    """One line of a trace; fields it does not name are ignored.

    `timestamp` is in milliseconds. `hash_ids` has one id for each block of 512 prompt tokens; two
    requests share a prefix exactly as far as their ids agree from the start.
    """

    timestamp: Milliseconds
    input_length: Length
    output_length: Length
    hash_ids: BlockIds

    @property
    def blocks(self) -> int:
        """The number of whole blocks of the prompt: only as many ids count."""
        return self.input_length // BLOCK_TOKENS


class Trace(msgspec.Struct, frozen=True):
    """A trace in memory. `digest` is the SHA-256 of the file's bytes as stored.

    `seed` is the one a generated trace names in its first line, None in any other.
    """

    name: str
    digest: str
    seed: int | None
    requests: list[Request]


class _FirstLine(msgspec.Struct, frozen=True):
    seed: BlockId | None = None


class _HashingReader(io.RawIOBase):
    """Passes bytes through; keeps the number and the SHA-256 of all that went by."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self.sha256 = hashlib.sha256()
        self.count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        chunk = self._raw.read(len(buffer))
        if chunk is None:
            raise OSError("it is non-blocking and has no data yet: give a file or a plain pipe")
        buffer[: len(chunk)] = chunk
        self.sha256.update(chunk)
        self.count += len(chunk)
        return len(chunk)


def read_trace(source: str, *, limit: int | None = None, stdin: BinaryIO | None = None) -> Trace:
    """Read the first `limit` requests (all by default) of the file `source`, or of stdin for "-".

    Gzip is told by its first bytes. The whole file goes into the digest. Requests without one
    whole block are left out, but count towards `limit`. Raises `TraceError`.
    """
    if limit is not None and limit < 1:
        raise SettingsError(f"limit is {limit}: give at least 1 request")
    if not source:
        raise SettingsError("TRACE is empty: name a file, or - for stdin")
    name = "stdin" if source == "-" else source
    try:
        if source == "-":
            if stdin is None and sys.stdin is None:
                raise TraceError(name, "cannot be read (it is closed)")
            return _read(name, stdin or sys.stdin.buffer, limit)
        with Path(source).open("rb") as file:
            return _read(name, file, limit)
    except OSError as error:
        raise TraceError(name, f"cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        if isinstance(error, SettingsError):
            raise
        raise TraceError(name, f"cannot be opened ({error})") from error


def _read(name: str, raw: IO[bytes], limit: int | None) -> Trace:
    hashing = _HashingReader(raw)
    buffered = io.BufferedReader(hashing, 2**20)
    stream: IO[bytes] | gzip.GzipFile = buffered
    if buffered.peek(2)[:2] == _GZIP_MAGIC:
        stream = gzip.GzipFile(fileobj=buffered)
    decoder = msgspec.json.Decoder(Request)
    requests: list[Request] = []
    seed: int | None = None
    number = 0
    for number, line in _lines(name, stream, hashing):
        request = _parse(name, number, line, decoder)
        if number == 1:
            seed = _seed(line)
        if request.blocks:
            requests.append(request)
        if number == limit:
            break
    if not requests:
        problem = "is empty" if number == 0 else "has no request of a whole block of 512 tokens"
        raise TraceError(name, problem + ": give a trace with requests")
    while buffered.read(2**20):
        pass
    return Trace(name, hashing.sha256.hexdigest(), seed, requests)


def _lines(
    name: str, stream: IO[bytes] | gzip.GzipFile, stored: _HashingReader
) -> Iterator[tuple[int, bytes]]:
    number, unpacked = 1, 0
    while True:
        try:
            line = stream.readline(MAX_LINE_BYTES + 1)
        except EOFError as error:
            raise TraceError(name, "gzip data is cut off here: fetch it again", number) from error
        except (gzip.BadGzipFile, zlib.error) as error:
            raise TraceError(name, f"gzip data is damaged here ({error})", number) from error
        if not line:
            return
        if len(line) > MAX_LINE_BYTES:
            raise TraceError(name, f"is longer than {MAX_LINE_BYTES} bytes", number)
        unpacked += len(line)
        if unpacked > max(_PACKED_FREELY, _MAX_RATIO * stored.count):
            problem = f"unpacks to more than {_MAX_RATIO} times its size: unpack it first"
            raise TraceError(name, problem, number)
        yield number, line
        number += 1


def _parse(name: str, number: int, line: bytes, decoder: msgspec.json.Decoder[Request]) -> Request:
    if not line.strip():
        raise TraceError(name, "is blank: remove it", number)
    if line.startswith(codecs.BOM_UTF8):
        raise TraceError(name, "starts with a byte order mark: save it without", number)
    try:
        line.decode()  # the decoder does not look into strings it skips
        record = decoder.decode(line)
    except UnicodeDecodeError as error:
        raise TraceError(name, f"is not UTF-8 (byte {error.start + 1})", number) from error
    except RecursionError as error:
        raise TraceError(name, "is nested too deeply", number) from error
    except msgspec.ValidationError as error:
        raise TraceError(name, _bad_field(str(error)), number) from error
    except msgspec.DecodeError as error:
        raise TraceError(name, f"is not a JSON object ({error})", number) from error
    if len(record.hash_ids) < record.blocks:
        problem = (
            f"field hash_ids: has {len(record.hash_ids)} ids, but input_length"
            f" {record.input_length} needs {record.blocks}"
        )
        raise TraceError(name, problem, number)
    return record


def _seed(line: bytes) -> int | None:
    """Return the seed that a generated trace names; of another type, it is a foreign field."""
    try:
        return msgspec.json.decode(line, type=_FirstLine).seed
    except msgspec.ValidationError:
        return None


def _bad_field(message: str) -> str:
    problem, _, path = message.partition(" - at `$.")
    if path:
        return f"field {path.rstrip('`')}: {problem.lower()}"
    return problem[0].lower() + problem[1:]
