"""A live server's traffic, written down in the trace format: lengths, times and block ids, no text.

The engine's scheduler reports arrivals and ends; a thread of its own does all the work. A fault of
the recording ends the recording, never a request.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from array import array
from collections.abc import Callable, Hashable, Iterable, Sequence
from hashlib import blake2b
from multiprocessing.util import Finalize
from typing import TypeAlias

import msgspec

from statecache.errors import escape_control_chars
from statecache.trace.format import BLOCK_TOKENS
from statecache.trace.record_file import FullError, RecordFile

__all__ = ["BlockIds", "Ended", "TraceRecorder"]

_MIB = 1 << 20
_FLUSH_BYTES = _MIB
_MOST_WAITING = 100_000  # events the thread has not seen yet, requests that have not ended
_MOST_TOKENS = 64 * _MIB  # of ended requests that the thread has not seen yet
_CLOSE_SECONDS = 10

Span: TypeAlias = tuple[int, int, str]
Observer: TypeAlias = Callable[[list[tuple[list[int], int]]], object]


class Ended(msgspec.Struct, frozen=True):
    """A request that ended. Two share ids only if they agree in `space` too.

    `space` is what else tells caches apart, like salt and adapter; `spans` are the (first token,
    tokens, identity) of what placeholder tokens stand for, like images.
    """

    tokens: Sequence[int]
    output_length: int
    space: tuple[str | None, ...] = ()
    spans: tuple[Span, ...] = ()
    session: str | None = None
    cached_tokens: int = 0  # what the engine reused of it


class BlockIds:
    """Names blocks of 512 tokens, each by a hash of all tokens up to its end.

    The hash has a random key that is never written: ids cannot be told from random numbers without
    it, so they give no token away, and no two recordings can be matched.
    """

    def __init__(self, key: bytes | None = None) -> None:
        self._key = secrets.token_bytes(32) if key is None else key

    def of(self, request: Ended) -> list[int]:
        """Return the ids of a prompt's whole blocks."""
        blocks = len(request.tokens) // BLOCK_TOKENS
        tokens = memoryview(array("q", request.tokens[: blocks * BLOCK_TOKENS])).cast("B")
        width = len(tokens) // blocks if blocks else 0
        digest = self._hash(b"space", msgspec.json.encode(request.space))
        ids = []
        for block in range(blocks):
            own = tokens[block * width : (block + 1) * width]
            digest = self._hash(digest, own, _spans_in(request.spans, block))
            ids.append(int.from_bytes(digest[:8]) >> 1)
        return ids

    def of_session(self, name: str) -> int:
        """Return the id of a session."""
        return int.from_bytes(self._hash(b"session", name.encode())[:8]) >> 1

    def _hash(self, *parts: bytes | memoryview) -> bytes:
        made = blake2b(key=self._key, digest_size=16)
        for part in parts:
            made.update(part)
        return made.digest()


def _spans_in(spans: Iterable[Span], block: int) -> bytes:
    start = block * BLOCK_TOKENS
    found = [
        (identity, first - start)
        for first, tokens, identity in spans
        if first < start + BLOCK_TOKENS and first + tokens > start
    ]
    return msgspec.json.encode(found) if found else b""


class _Line(msgspec.Struct):
    """A request on its way into the file; `data` is None until it ended."""

    arrived: float
    ended: float = 0
    data: bytes | None = None
    seen: tuple[list[int], int] | None = None  # ids, and the tokens that the engine reused


_Event: TypeAlias = tuple[Hashable, float, Ended | None]


class TraceRecorder:
    """Records the requests of one scheduler to `path`, one line for each that ended.

    `observe` is called with the ids and the reused tokens of each of them, in the order of the
    lines and in the recorder's thread; without a `path` only that happens.

    Lines are in the order of arrival: one that ended waits for those that arrived before it, for
    `patience` seconds at most. They reach the file within a second: both engines kill their
    scheduler when they stop, and a SIGKILL leaves a sound file. Raises `SettingsError` if the file
    cannot be made.
    """

    def __init__(
        self,
        path: str | None,
        most_mib: int,
        log: logging.Logger,
        *,
        patience: float = 60,
        interval: float = 0.5,
        ids: BlockIds | None = None,
        observe: Observer | None = None,
    ) -> None:
        self._file = None if path is None else RecordFile(path, most_mib * _MIB)
        name = "" if self._file is None else escape_control_chars(self._file.name)
        self._what = f"the recording to {name}" if name else "the dry run"
        self._observe = observe
        self._most_mib = most_mib
        self._log = log
        self._patience, self._interval = patience, interval
        self._ids = ids or BlockIds()
        self._start = time.monotonic()
        self._recording = True
        self._written = 0
        self._events: queue.SimpleQueue[_Event | None] = queue.SimpleQueue()  # None: the end
        self._told_tokens = self._seen_tokens = 0  # the scheduler counts one, the thread the other
        self._running: dict[Hashable, _Line] = {}
        self._order: list[_Line] = []  # by arrival: running, or waiting for one that is
        self._fresh_bytes = 0
        self._thread = threading.Thread(target=self._run, name="statecache-record", daemon=True)
        self._thread.start()
        # At the end of any process, also of one that multiprocessing started.
        self._at_exit = Finalize(None, self.close, exitpriority=10)
        if path is not None:
            log.info("statecache: recording requests to %s, %d MiB at most", name, most_mib)

    @property
    def recording(self) -> bool:
        """Whether requests are still recorded."""
        return self._recording

    # What the scheduler calls: nothing here takes long, or fails.

    def arrived(self, name: Hashable) -> None:
        """A request arrived; one that is running under this name already is the same."""
        self._tell((name, time.monotonic(), None))

    def ended(self, name: Hashable, request: Ended) -> None:
        """A request ended; one that ended already, or never arrived, is not recorded."""
        self._told_tokens += len(request.tokens)
        self._tell((name, time.monotonic(), request))

    def stop(self, why: str) -> None:
        """End the recording because of something that must not happen."""
        if self._recording:
            self._recording = False
            self._log.error("statecache: %s; %s ends here", why, self._what)
            self._events.put(None)

    def close(self) -> None:
        """Write what ended so far, and end."""
        self._at_exit.cancel()
        if self._thread.is_alive():
            self._recording = False
            self._events.put(None)
            self._thread.join(_CLOSE_SECONDS)

    def _tell(self, event: _Event) -> None:
        if self._recording:
            self._events.put(event)
            tokens = self._told_tokens - self._seen_tokens
            if self._events.qsize() > _MOST_WAITING or tokens > _MOST_TOKENS:
                self.stop("requests end faster than they can be written")

    # What the thread does.

    def _run(self) -> None:
        try:
            self._record()
            self._log.info("statecache: %s ends after %d requests", self._what, self._written)
        except (FullError, OSError) as error:
            self._file_failed(error)
        except (AttributeError, OverflowError, TypeError, ValueError) as error:
            what = "statecache: a request is not as expected (%s); %s ends here"
            self._log.error(what, error, self._what)
        finally:
            self._recording = False
            if self._file is not None:
                self._file.close()
            self._running.clear()
            self._order.clear()
            self._events = queue.SimpleQueue()  # nobody reads what came in the meantime

    def _file_failed(self, error: Exception) -> None:
        if isinstance(error, FullError):
            what = "statecache: %s has reached %d MiB%s and ends here"
            earlier = " with those before it" if self._file is not None and self._file.taken else ""
            self._log.warning(what, self._what, self._most_mib, earlier)
        else:
            why = getattr(error, "strerror", error)
            self._log.error("statecache: %s ends here (%s)", self._what, why)

    def _record(self) -> None:
        due = time.monotonic() + self._interval
        while True:
            try:
                event = self._events.get(timeout=max(due - time.monotonic(), 0))
                if event is None:
                    break
                self._note(*event)
            except queue.Empty:
                pass
            if time.monotonic() >= due or self._fresh_bytes > _FLUSH_BYTES:
                self._write(final=False)
                due = time.monotonic() + self._interval
        self._write(final=True)

    def _note(self, name: Hashable, now: float, request: Ended | None) -> None:
        if request is None:
            if name not in self._running:
                self._running[name] = line = _Line(now)
                self._order.append(line)
                if len(self._running) > _MOST_WAITING:  # its end was never told
                    self._running.pop(next(iter(self._running))).data = b""
            return
        self._seen_tokens += len(request.tokens)
        ended = self._running.pop(name, None)
        if ended is not None:
            ids = self._ids.of(request)
            ended.ended, ended.data = now, self._line(ended.arrived, request, ids)
            ended.seen = ids, min(request.cached_tokens, len(request.tokens))
            self._fresh_bytes += len(ended.data)

    def _line(self, arrived: float, request: Ended, ids: list[int]) -> bytes:
        line: dict[str, object] = {
            "timestamp": int((arrived - self._start) * 1000),
            "input_length": len(request.tokens),
            "output_length": request.output_length,
            "hash_ids": ids,
        }
        if request.session is not None:
            line["session_id"] = self._ids.of_session(request.session)
        return msgspec.json.encode(line) + b"\n"

    def _write(self, *, final: bool) -> None:
        self._fresh_bytes = 0
        latest = time.monotonic() - self._patience
        impatient = final or any(
            line.data is not None and line.ended < latest for line in self._order
        )
        ready: list[_Line] = []
        waiting: list[_Line] = []
        for line in self._order:
            if line.data is not None and (impatient or not waiting):
                ready.append(line)
            else:
                waiting.append(line)
        self._order = waiting
        if self._observe is not None:
            self._observe([line.seen for line in ready if line.seen is not None])
        lines = [line.data for line in ready if line.data]
        if lines and self._file is not None:
            self._append(self._file, lines)
        elif self._file is None:
            self._written += len(lines)

    def _append(self, file: RecordFile, lines: list[bytes]) -> None:
        try:
            self._written += file.append(lines)
        except (FullError, OSError) as error:
            if self._observe is None:
                raise
            self._file_failed(error)  # the observer goes on
            file.close()
            self._file, self._what = None, "the dry run"
