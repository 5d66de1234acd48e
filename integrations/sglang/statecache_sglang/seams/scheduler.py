"""The scheduler: its requests, its rank and its metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b

from statecache.engine.metrics import Exporter, PrometheusClasses
from statecache.trace.recorder import Ended
from statecache_sglang import engine_paths as at
from statecache_sglang.pool_views import RequestPool
from statecache_sglang.seams import load
from statecache_sglang.seams.slots import is_hybrid_pool
from statecache_sglang.views import (
    Request,
    Scheduler,
)

__all__ = [
    "ended",
    "exporter",
    "go_on",
    "has_tokens",
    "is_first_rank",
    "namespace",
    "namespace_of",
    "no_more",
    "no_room",
    "state_pool",
]


def no_room() -> object:
    """What `PrefillAdder.add_one_req` says of a request that must wait for memory."""
    result: object = load(at.ADDER).AddReqResult.NO_TOKEN
    return result


def no_more() -> object:
    """What it says where this step takes no further request."""
    result: object = load(at.ADDER).AddReqResult.OTHER
    return result


def go_on() -> object:
    """What it says where the next request may be asked."""
    result: object = load(at.ADDER).AddReqResult.CONTINUE
    return result


def is_first_rank() -> bool:
    """Whether this process is the first of the tensor-parallel ranks."""
    return int(load(at.CONTEXT).get_parallel().tp_rank) == 0


def has_tokens(req: Request) -> bool:
    """Whether the tokens of a `Req` say what its prompt is: not where embeddings do."""
    return req.input_embeds is None and req.positional_embed_overrides is None


def namespace_of(req: Request) -> bytes:
    """Return what keeps the prefixes of a `Req` apart from those of another namespace.

    The one name of it: for points of `learned`, records of slots, shared heads and recordings.
    """
    return namespace(req.extra_key, req.cache_salt, req.lora_id)


@lru_cache(maxsize=1024)
def namespace(extra_key: str | None, cache_salt: str | None, lora_id: str | None = None) -> bytes:
    """Return the name of a namespace, empty for the one without a key, a salt and an adapter.

    SGLang 0.5.23 appends the adapter's id to `extra_key`, with nothing in between: which part is
    whose, the id tells.
    """
    parts = (extra_key, cache_salt, lora_id)
    if parts == (None, None, None):
        return b""
    return blake2b(repr(parts).encode(), digest_size=16).digest()


def ended(req: Request, tokens: Sequence[int]) -> Ended:
    """Return what is recorded of a `Req` that came with `tokens`.

    Placeholders of images already have numbers that tell images apart.
    """
    space = namespace_of(req)
    session = req.session.session_id if req.session is not None else req.session_id
    return Ended(
        tokens,
        len(req.output_ids_through_stop),
        (space.hex(),) if space else (),
        (),
        session,
        req.cached_tokens,
    )


def state_pool(scheduler: Scheduler) -> tuple[RequestPool, int] | None:
    """Return the pool of recurrent states and the tokens of KV; None where there are no states."""
    pool = scheduler.req_to_token_pool
    return (pool, int(scheduler.max_total_num_tokens)) if is_hybrid_pool(pool) else None


def exporter() -> Callable[[dict[str, float]], None] | None:
    """Return what takes changes for the metrics of this scheduler, None where it shows none.

    prometheus_client is imported here and not before: SGLang 0.5.23 names the folder its processes
    share when it starts the engine. As SGLang's own, the metrics are those of one rank of several.
    """
    context = load(at.CONTEXT)
    observability, parallel = context.get_observability(), context.get_parallel()
    reports = parallel.attn_tp_rank == 0 or observability.enable_metrics_for_all_schedulers
    if not (observability.enable_metrics and reports):
        return None
    client = load("prometheus_client")
    classes = PrometheusClasses(client.Counter, client.Gauge, client.Histogram)
    model = context.get_serving().served_model_name
    return Exporter(classes, "sglang", str(model), parallel.tp_rank).apply
