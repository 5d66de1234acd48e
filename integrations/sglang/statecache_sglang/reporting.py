"""What the metrics say of a cache: the parts of the plugin count, here it is read at intervals."""

from __future__ import annotations

from statecache.engine.metrics import BestEffort, MetricKey, Reporter
from statecache_sglang.scheduler_side import scheduler_side_of
from statecache_sglang.seams import scheduler
from statecache_sglang.seams import slots as state_slots
from statecache_sglang.views import (
    Request,
    TreeCache,
)

__all__ = ["admitted", "report", "sample"]


def report(cache: TreeCache) -> None:
    """Export the metrics of a cache the index manages, about once a second."""
    side = scheduler_side_of(cache)
    if side is None:
        return
    if side.reporter is None:
        side.reporter = Reporter(lambda: sample(cache), scheduler.exporter)
    side.reporter.flush()


def _admitted(cache: TreeCache, req: Request) -> None:
    side = scheduler_side_of(cache)
    if side is not None:
        hit = int(req.prefix_len)
        kv = getattr(req, "statecache_kv_tokens", hit)
        side.counts.admitted(len(req.full_untruncated_fill_ids), hit, kv)


admitted = BestEffort(_admitted)
"""`admitted(cache, req)` counts a request that is going to be prefilled."""


def sample(cache: TreeCache) -> dict[str, float]:
    """Return every number there is about `cache` now; none where SGLang manages it alone."""
    side = scheduler_side_of(cache)
    if side is None:
        return {}
    total, free, checkpoints = state_slots.pool_sizes(cache)
    registry = side.registry
    found: dict[str, float] = {
        **side.counts.sample(),
        **registry.sample(),
        MetricKey.ACTIVE.of(registry.policy): float(side.faults.active),
        MetricKey.ANOMALIES.value: side.faults.anomalies,
        MetricKey.SLOTS.of("active"): total,
        MetricKey.SLOTS_FREE.of("active"): free,
        MetricKey.STATES_RESIDENT.of("host"): len(registry.host_only()),
    }
    pool = "active"
    if checkpoints is not None:
        pool = "checkpoint"
        found[MetricKey.SLOTS.of(pool)] = checkpoints.num_slots
        found[MetricKey.SLOTS_FREE.of(pool)] = int(checkpoints.available_size())
        stored, restored = (getattr(checkpoints, name, 0) for name in ("stored", "restored"))
        size = getattr(checkpoints, "bytes_per_state", 0)
        found[MetricKey.ANOMALIES.value] += getattr(checkpoints, "anomalies", 0)
        found[MetricKey.CHECKPOINT_STORES.of("int8")] = stored
        found[MetricKey.CHECKPOINT_RESTORES.of("int8")] = restored
        found[MetricKey.CHECKPOINT_STORED_BYTES.of("int8")] = stored * size
        found[MetricKey.CHECKPOINT_RESTORED_BYTES.of("int8")] = restored * size
    found[MetricKey.STATES_RESIDENT.of(pool)] = len(registry)
    found[MetricKey.STATES_PINNED.of(pool)] = int(cache.mamba_protected_size())
    return found
