"""What the metrics say of a cache: the parts of the plugin count, here it is read at intervals."""

from __future__ import annotations

from typing import Any

from statecache.engine.metrics import Quiet, Reporter
from statecache_sglang import pool_seams

__all__ = ["admitted", "report", "sample"]


def report(cache: Any) -> None:
    """Export the metrics of a cache the index leads, about once a second."""
    advisor = getattr(cache.tree_core, "advisor", None)
    if advisor is None:
        return
    if advisor.reporter is None:
        advisor.reporter = Reporter(lambda: sample(cache), pool_seams.exporter)
    advisor.reporter.report()


def _admitted(cache: Any, req: Any) -> None:
    advisor = getattr(cache.tree_core, "advisor", None)
    if advisor is not None:
        hit = int(req.prefix_len)
        kv = getattr(req, "statecache_kv_tokens", hit)
        advisor.counts.admitted(len(req.full_untruncated_fill_ids), hit, kv)


admitted = Quiet(_admitted)
"""`admitted(cache, req)` counts a request that is going to be prefilled."""


def sample(cache: Any) -> dict[str, float]:
    """Return every number there is about `cache` now."""
    advisor = cache.tree_core.advisor
    total, free, checkpoints = pool_seams.pool_sizes(cache)
    found: dict[str, float] = {
        **advisor.counts.sample(),
        **advisor.book.sample(),
        f"active|{advisor.book.policy}": float(advisor.active),
        "anomalies": advisor.anomalies,
        "slots|active": total,
        "slots_free|active": free,
        "states_resident|host": len(advisor.book.on_host_alone()),
    }
    pool = "active"
    if checkpoints is not None:
        pool = "checkpoint"
        found["slots|checkpoint"] = checkpoints.num_slots
        found["slots_free|checkpoint"] = int(checkpoints.available_size())
        stored, restored = (getattr(checkpoints, name, 0) for name in ("stored", "restored"))
        size = getattr(checkpoints, "bytes_per_state", 0)
        found["anomalies"] += getattr(checkpoints, "failed", 0)
        found["checkpoint_stores|int8"] = stored
        found["checkpoint_restores|int8"] = restored
        found["checkpoint_stored_bytes|int8"] = stored * size
        found["checkpoint_restored_bytes|int8"] = restored * size
    found[f"states_resident|{pool}"] = len(advisor.book)
    found[f"states_pinned|{pool}"] = pool_seams.pinned_states(cache)
    return found
