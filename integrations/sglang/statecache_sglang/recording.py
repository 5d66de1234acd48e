"""Feeds a recording of the requests that one scheduler of SGLang serves."""

from __future__ import annotations

import logging
from typing import Any

from statecache.errors import SettingsError
from statecache.record import TraceRecorder
from statecache.settings import Settings
from statecache_sglang import record_seams
from statecache_sglang.seams import Patch

__all__ = ["Recording", "patches"]

_MOST_RUNNING = 100_000
_log = logging.getLogger("statecache.sglang")


class Recording:
    """Begins when the scheduler of the first rank is there; sees its requests come and go."""

    def __init__(self, path: str, most_mib: int) -> None:
        self._path, self._most_mib = path, most_mib
        self._recorder: TraceRecorder | None = None
        self._tokens: dict[int, tuple[Any, Any]] = {}  # by id: the request, and what it came with

    def patches(self) -> tuple[Patch, ...]:
        """Return what lets it hear of requests."""
        return record_seams.patches(self.begin, self.arrived, self.gone)

    def begin(self) -> None:
        """Open the file; stop a server whose file cannot be made."""
        if not record_seams.is_first_rank():
            return
        try:
            self._recorder = TraceRecorder(self._path, self._most_mib, _log)
        except SettingsError as error:
            raise SystemExit(f"statecache: {error}") from None

    def arrived(self, req: Any) -> None:
        """A request was queued, or once more after it was retracted."""
        recorder = self._recorder
        if recorder is None or not recorder.recording or id(req) in self._tokens:
            return
        if len(self._tokens) >= _MOST_RUNNING:  # an end that was not seen
            self._tokens.pop(next(iter(self._tokens)))
        try:
            if record_seams.has_tokens(req):
                # SGLang puts one token in the place of a prompt that it aborts.
                self._tokens[id(req)] = req, req.origin_input_ids
                recorder.arrived(id(req))
        except Exception as error:
            self._stop(recorder, error)

    def gone(self, req: Any) -> None:
        """A request ended, or was aborted."""
        recorder = self._recorder
        _, tokens = self._tokens.pop(id(req), (None, None))
        if recorder is None or tokens is None:
            return
        try:
            recorder.ended(id(req), record_seams.ended(req, tokens))
        except Exception as error:
            self._stop(recorder, error)

    def _stop(self, recorder: TraceRecorder, error: Exception) -> None:
        self._recorder = None
        self._tokens.clear()
        recorder.stop(f"a request is not as expected ({error})")


def patches(settings: Settings) -> tuple[Patch, ...]:
    """Return what records the requests, if the settings ask for it."""
    if settings.record is None:
        return ()
    return Recording(settings.record, settings.record_mib).patches()
