"""Where a scheduler of SGLang 0.5.23 gets its requests and lets go of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from statecache.engine.seams import Seam, methods
from statecache.trace.recorder import Ended
from statecache_sglang import engine_paths as at
from statecache_sglang.seams import AroundPatch, Patch, is_hybrid_pool, load

__all__ = ["SEAMS", "ended", "has_tokens", "is_first_rank", "patches", "state_pool"]

SEAMS: tuple[Seam, ...] = (
    *methods(
        at.SCHEDULER,
        "Scheduler",
        {
            "__init__": "server_args port_args",
            "_add_request_to_queue": "req is_retracted",
            "send_abort_output": "abort_req req",
        },
    ),
    *methods(
        at.STREAMER,
        "SchedulerOutputStreamer",
        {"stream_output": "reqs return_logprob skip_req"},
    ),
    Seam(at.CONTEXT, "get_parallel", ()),
)


def is_first_rank() -> bool:
    """Whether this process is the first of the tensor-parallel ranks."""
    return int(load(at.CONTEXT).get_parallel().tp_rank) == 0


def has_tokens(req: Any) -> bool:
    """Whether the tokens of a `Req` say what its prompt is: not where embeddings do."""
    return req.input_embeds is None and req.positional_embed_overrides is None


def ended(req: Any, tokens: Any) -> Ended:
    """Return what is recorded of a `Req` that came with `tokens`.

    Placeholders of images already have numbers that tell images apart; the adapter is part of
    `extra_key`.
    """
    session = req.session.session_id if req.session is not None else req.session_id
    return Ended(
        tokens,
        len(req.output_ids_through_stop),
        (req.extra_key, req.cache_salt),
        (),
        session,
        req.cached_tokens,
    )


def state_pool(scheduler: Any) -> tuple[Any, int] | None:
    """Return the pool of recurrent states and the tokens of KV; None where there are no states."""
    pool = scheduler.req_to_token_pool
    return (pool, int(scheduler.max_total_num_tokens)) if is_hybrid_pool(pool) else None


def patches(
    begin: Callable[[Any], None],
    arrived: Callable[[Any], None],
    gone: Callable[[Any], None],
) -> tuple[Patch, ...]:
    """Return what calls `begin` with a scheduler that is there, and the others for its requests.

    `arrived` is called again for a request that was retracted, `gone` more than once for one that
    ended.
    """

    def init(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> None:
        original(scheduler, *args, **kwargs)
        begin(scheduler)

    def queued(
        original: Callable[..., Any], scheduler: Any, req: Any, *args: Any, **kwargs: Any
    ) -> Any:
        arrived(req)
        return original(scheduler, req, *args, **kwargs)

    def aborted(original: Callable[..., Any], scheduler: Any, abort_req: Any, req: Any) -> Any:
        gone(req)
        return original(scheduler, abort_req, req)

    def streamed(
        original: Callable[..., Any], streamer: Any, reqs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        for req in reqs:
            if req.finished():
                gone(req)
        return original(streamer, reqs, *args, **kwargs)

    scheduler = load(at.SCHEDULER).Scheduler
    streamer = load(at.STREAMER).SchedulerOutputStreamer
    return (
        AroundPatch(scheduler, "__init__", init),
        AroundPatch(scheduler, "_add_request_to_queue", queued),
        AroundPatch(scheduler, "send_abort_output", aborted),
        AroundPatch(streamer, "stream_output", streamed),
    )
