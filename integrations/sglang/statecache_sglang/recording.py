"""Feeds a recording of the requests that one scheduler of SGLang serves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from statecache.engine.metrics import DRY_RUN, MetricKey, Reporter
from statecache.engine.settings import Settings
from statecache.errors import SettingsError, exit_engine
from statecache.replay.online import begin
from statecache.trace.recorder import Observer, TraceRecorder
from statecache_sglang.seams import scheduler as scheduler_seams
from statecache_sglang.views import (
    Request,
    Scheduler,
)

__all__ = ["Recording"]

_MOST_RUNNING = 100_000
_log = logging.getLogger("statecache.sglang")


class Recording:
    """Begins when the scheduler of the first rank is there; sees its requests come and go."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._recorder: TraceRecorder | None = None
        # By id: the request, and the tokens it came with.
        self._tokens: dict[int, tuple[Request, Sequence[int]]] = {}

    # Around methods of SGLang.

    def begin_with_scheduler(
        self,
        original: Callable[..., None],
        scheduler: Scheduler,
        *args: object,
        **kwargs: object,
    ) -> None:
        """Around `Scheduler.__init__`."""
        original(scheduler, *args, **kwargs)
        self.begin(scheduler)

    def note_arrival(
        self,
        original: Callable[..., object],
        scheduler: Scheduler,
        req: Request,
        *args: object,
        **kwargs: object,
    ) -> object:
        """Around `Scheduler._add_request_to_queue`, which queues a retracted request again."""
        self.arrived(req)
        return original(scheduler, req, *args, **kwargs)

    def note_abort(
        self,
        original: Callable[..., object],
        scheduler: Scheduler,
        abort_req: object,
        req: Request,
    ) -> object:
        """Around `Scheduler.send_abort_output`."""
        self.ended(req)
        return original(scheduler, abort_req, req)

    def note_ends(
        self,
        original: Callable[..., object],
        streamer: object,
        reqs: Sequence[Request],
        *args: object,
        **kwargs: object,
    ) -> object:
        """Around `SchedulerOutputStreamer.stream_output`, which may show an end more than once."""
        for req in reqs:
            if req.finished():
                self.ended(req)
        return original(streamer, reqs, *args, **kwargs)

    # What is recorded.

    def begin(self, scheduler: Scheduler) -> None:
        """Open the file; stop a server whose file cannot be made."""
        if not scheduler_seams.is_first_rank():
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

    def _shadow(self, scheduler: Scheduler) -> Observer | None:
        """Return what replays the requests beside the engine and shows the numbers."""
        found = scheduler_seams.state_pool(scheduler)
        if found is None:
            _log.warning("statecache: this model caches no recurrent states; no dry run")
            return None
        pool, kv_tokens = found
        slots = self._settings.checkpoint_slots or int(pool.mamba_pool.size)
        if self._settings.checkpoints is not None and self._settings.checkpoint_slots is None:
            from statecache_sglang.checkpoints import slots_beside

            slots = slots_beside(pool)
        export = scheduler_seams.exporter()  # here: this thread has SGLang's context

        def sample() -> dict[str, float]:
            return {MetricKey.ACTIVE.of(DRY_RUN): 0.0, **shadow.sample()}

        reporter = Reporter(sample, lambda: export)
        shadow, observe = begin(
            slots, kv_tokens, self._settings, _log, lambda: reporter.flush(force=True)
        )
        reporter.flush()
        return observe

    def arrived(self, req: Request) -> None:
        """A request was queued, or once more after it was retracted."""
        recorder = self._recorder
        if recorder is None or not recorder.recording or id(req) in self._tokens:
            return
        if len(self._tokens) >= _MOST_RUNNING:  # an end that was not seen
            self._tokens.pop(next(iter(self._tokens)))
        try:
            if scheduler_seams.has_tokens(req):
                # SGLang puts one token in the place of a prompt that it aborts.
                self._tokens[id(req)] = req, req.origin_input_ids
                recorder.arrived(id(req))
        except Exception as error:
            self._stop(recorder, error)

    def ended(self, req: Request) -> None:
        """A request ended, or was aborted."""
        recorder = self._recorder
        _, tokens = self._tokens.pop(id(req), (None, None))
        if recorder is None or tokens is None:
            return
        try:
            recorder.ended(id(req), scheduler_seams.ended(req, tokens))
        except Exception as error:
            self._stop(recorder, error)

    def _stop(self, recorder: TraceRecorder, error: Exception) -> None:
        self._recorder = None
        self._tokens.clear()
        recorder.stop(f"a request is not as expected ({error})")
