"""What is done once in a step of the scheduler, before requests are matched, and when idle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from statecache.engine.metrics import MetricKey
from statecache_sglang.scheduler_side import scheduler_side_of
from statecache_sglang.seams import slots as state_slots
from statecache_sglang.seams import tree
from statecache_sglang.views import Request, SchedulePolicy, TreeCache

if TYPE_CHECKING:
    from statecache_sglang.checkpoints import CheckpointSlots

__all__ = ["begin_step", "plugin_pool", "read_all_reports"]

_MAMBA = tree.mamba_type()


def begin_step(
    original: Callable[..., object],
    policy: SchedulePolicy,
    waiting_queue: Sequence[Request],
    *args: object,
    **kwargs: object,
) -> object:
    """Around `SchedulePolicy.calc_priority`, which sorts the queue and matches follow."""
    result = original(policy, waiting_queue, *args, **kwargs)
    cache = policy.tree_cache
    side = scheduler_side_of(cache)
    if side is not None:
        side.note_queue(waiting_queue)
        slots = plugin_pool(cache)
        if slots is not None:
            _drop(cache, slots, slots.begin_step())
    return result


def read_all_reports(cache: TreeCache) -> list[int]:
    """Nothing runs but copies into the pool: read what became of each, which waits for those.

    Returns the slots that turned out to hold nothing; what can be dropped of them is.
    """
    slots = plugin_pool(cache)
    if slots is None:
        return []
    refused = slots.read_all()
    _drop(cache, slots, refused)
    return refused


def plugin_pool(cache: TreeCache) -> CheckpointSlots | None:
    """Return the plugin's pool of checkpoints; SGLang's own keeps no records."""
    pool = state_slots.checkpoint_pool(cache.req_to_token_pool)
    return pool if hasattr(pool, "records") else None  # type: ignore[return-value]  # ours


def _drop(cache: TreeCache, slots: CheckpointSlots, refused: list[int]) -> None:
    """Drop the states of slots that turned out to hold nothing; one that is locked goes later.

    Once advice was given up SGLang's own order drops them some day; no request starts from them.
    """
    side = scheduler_side_of(cache)
    if not refused or side is None:
        return
    side.counts.add(MetricKey.SKIPS.of("not_finite"), len(refused))

    def holds_nothing(node: int) -> bool:
        state = cache.tree_core.get_component_device_value(node, _MAMBA)
        return state is not None and slots.was_refused(state)

    side.condemn_all(holds_nothing)
    for _ in refused:
        if side.has_condemned():
            state_slots.evict_checkpoint(cache)
