"""Recorded workloads: Mooncake-style JSON lines, plain or gzip."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import sys
import zlib
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, BinaryIO, TypeVar

import msgspec

from statecache.errors import SettingsError, TraceError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "BLOCK_TOKENS",
    "MAX_IDS",
    "MAX_LINE_BYTES",
    "MAX_MILLISECONDS",
    "BlockId",
    "Length",
    "Request",
    "StoredFile",
    "Trace",
    "decode_line",
    "described",
    "opened",
    "read_trace",
]

BLOCK_TOKENS = 512
MAX_LINE_BYTES = 64 * 2**20
MAX_IDS = 2**22  # of a prompt of 2^31 tokens

# A packed file that unpacks to more than this is refused beyond this ratio: traces reach 5 to 20.
_PACKED_FREELY = 256 * 2**20
_MAX_RATIO = 100

_GZIP_MAGIC = b"\x1f\x8b"

MAX_MILLISECONDS = 2**53  # what a float holds exactly
_Time = msgspec.Meta(ge=0, le=MAX_MILLISECONDS)
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


AnyRequest = TypeVar("AnyRequest", bound=Request)


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
    with opened(source, stdin) as stored:
        return _read(stored, limit)


class StoredFile:
    """The lines of a file, plain or gzip, told by its first bytes."""

    def __init__(self, name: str, raw: IO[bytes]) -> None:
        self.name = name
        self._hashing = _HashingReader(raw)
        self._buffered = io.BufferedReader(self._hashing, 2**20)
        self._stream: IO[bytes] | gzip.GzipFile = self._buffered
        if self._buffered.peek(2)[:2] == _GZIP_MAGIC:
            self._stream = gzip.GzipFile(fileobj=self._buffered)

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield each line with its number, from 1. Raises `TraceError` for one without an end."""
        number, unpacked = 1, 0
        while line := self._line(number):
            unpacked += len(line)
            if unpacked > max(_PACKED_FREELY, _MAX_RATIO * self._hashing.count):
                problem = f"unpacks to more than {_MAX_RATIO} times its size: unpack it first"
                raise TraceError(self.name, problem, number)
            yield number, line
            number += 1

    def digest(self) -> str:
        """Read to the end; return the SHA-256 of the bytes as stored."""
        while self._buffered.read(2**20):
            pass
        return self._hashing.sha256.hexdigest()

    def _line(self, number: int) -> bytes:
        try:
            line = self._stream.readline(MAX_LINE_BYTES + 1)
        except EOFError as error:
            problem = "gzip data is cut off here: fetch it again"
            raise TraceError(self.name, problem, number) from error
        except (gzip.BadGzipFile, zlib.error) as error:
            problem = f"gzip data is damaged here ({error})"
            raise TraceError(self.name, problem, number) from error
        if len(line) > MAX_LINE_BYTES:
            raise TraceError(self.name, f"is longer than {MAX_LINE_BYTES} bytes", number)
        return line


@contextmanager
def opened(source: str, stdin: BinaryIO | None = None) -> Iterator[StoredFile]:
    """Open the file `source`, or stdin for "-". What fails to be read raises `TraceError`."""
    if not source:
        raise SettingsError("TRACE is empty: name a file, or - for stdin")
    name = "stdin" if source == "-" else source
    try:
        if source == "-":
            if stdin is None and sys.stdin is None:
                raise TraceError(name, "cannot be read (it is closed)")
            yield StoredFile(name, stdin or sys.stdin.buffer)
            return
        with Path(source).open("rb") as file:
            yield StoredFile(name, file)
    except OSError as error:
        raise TraceError(name, f"cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        if isinstance(error, SettingsError):
            raise
        raise TraceError(name, f"cannot be opened ({error})") from error


def _read(stored: StoredFile, limit: int | None) -> Trace:
    decoder = msgspec.json.Decoder(Request)
    requests: list[Request] = []
    seed: int | None = None
    number = 0
    for number, line in stored.lines():
        request = decode_line(stored.name, number, line, decoder)
        if number == 1:
            seed = _seed(line)
        if request.blocks:
            requests.append(request)
        if number == limit:
            break
    if not requests:
        problem = "is empty" if number == 0 else "has no request of a whole block of 512 tokens"
        raise TraceError(stored.name, problem + ": give a trace with requests")
    return Trace(stored.name, stored.digest(), seed, requests)


def decode_line(
    name: str, number: int, line: bytes, decoder: msgspec.json.Decoder[AnyRequest]
) -> AnyRequest:
    """Return the request of a line. Raises `TraceError` naming file, line and field."""
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
        raise TraceError(name, described(str(error)), number) from error
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


def described(message: str) -> str:
    """Return what msgspec says of a wrong field, the field first."""
    problem, _, path = message.partition(" - at `$.")
    if path:
        return f"field {path.rstrip('`')}: {problem.lower()}"
    return problem[0].lower() + problem[1:]
