"""Feeds a recording of the requests that one scheduler of SGLang serves."""

from __future__ import annotations

import logging
from typing import Any

from statecache.engine.metrics import DRY_RUN, Reporter
from statecache.engine.settings import Settings
from statecache.errors import SettingsError, exit_engine
from statecache.replay.online import begin
from statecache.trace.recorder import Observer, TraceRecorder
from statecache_sglang import pool_seams, record_seams
from statecache_sglang.seams import Patch

__all__ = ["Recording", "patches"]

_MOST_RUNNING = 100_000
_log = logging.getLogger("statecache.sglang")


class Recording:
    """Begins when the scheduler of the first rank is there; sees its requests come and go."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._recorder: TraceRecorder | None = None
        self._tokens: dict[int, tuple[Any, Any]] = {}  # by id: the request, and what it came with

    def patches(self) -> tuple[Patch, ...]:
        """Return what lets it hear of requests."""
        return record_seams.patches(self.begin, self.arrived, self.gone)

    def begin(self, scheduler: Any) -> None:
        """Open the file; stop a server whose file cannot be made."""
        if not record_seams.is_first_rank():
            return
        settings = self._settings
        observe = self._shadow(scheduler) if settings.dry_run else None
        if settings.record is None and observe is None:
            return
        try:
            self._recorder = TraceRecorder(
                settings.record, settings.record_mib, _log, observe=observe
            )
        except SettingsError as error:
            exit_engine(error)

    def _shadow(self, scheduler: Any) -> Observer | None:
        """Return what replays the requests beside the engine and shows the numbers."""
        found = record_seams.state_pool(scheduler)
        if found is None:
            _log.warning("statecache: this model caches no recurrent states; no dry run")
            return None
        pool, kv_tokens = found
        slots = self._settings.checkpoint_slots or int(pool.mamba_pool.size)
        if self._settings.checkpoints is not None and self._settings.checkpoint_slots is None:
            from statecache_sglang.checkpoints import slots_beside

            slots = slots_beside(pool)
        export = pool_seams.exporter()  # here: this thread has SGLang's context

        def sample() -> dict[str, float]:
            return {f"active|{DRY_RUN}": 0.0, **shadow.sample()}

        reporter = Reporter(sample, lambda: export)
        shadow, observe = begin(
            slots, kv_tokens, self._settings, _log, lambda: reporter.report(now=True)
        )
        reporter.report()
        return observe

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
    """Return what records the requests or replays them, if the settings ask for it."""
    if settings.record is None and not settings.dry_run:
        return ()
    return Recording(settings).patches()
