"""active + cached + free = total, for each state pool, at any idle moment.

SGLang 0.5.23 adds up its own counters. Here the cached states are those of the index and the
active ones those that the requests say they hold, so that neither can drift unseen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from statecache_sglang import reporting
from statecache_sglang.scheduler_side import SchedulerSide, scheduler_side_of
from statecache_sglang.seams import slots as state_slots
from statecache_sglang.steps import read_all_reports
from statecache_sglang.views import (
    InvariantChecker,
    TreeCache,
)


class Account(NamedTuple):
    """The slots of one pool."""

    pool: str
    total: int
    active: int
    cached: int
    free: int

    @property
    def balanced(self) -> bool:
        """Whether every slot is accounted for."""
        return self.active + self.cached + self.free == self.total

    def __str__(self) -> str:
        return (
            f"[statecache {self.pool}] total={self.total}, active={self.active},"
            f" cached={self.cached}, free={self.free}"
        )


def accounts(cache: TreeCache, side: SchedulerSide, active: int) -> list[Account]:
    """Return the pools of a cache the index manages; none once SGLang's own order took over."""
    if not side.faults.active:
        return []
    cached = len(side.registry)
    total, free, checkpoints = state_slots.pool_sizes(cache)
    if checkpoints is None:
        return [Account("states", total, active, cached, free)]
    return [
        Account("states", total, active, 0, free),
        Account("int8 states", checkpoints.num_slots, 0, cached, int(checkpoints.available_size())),
    ]


def check_state_pools(
    original: Callable[..., tuple[bool, str]], checker: InvariantChecker, stats: object
) -> tuple[bool, str]:
    """Around SGLang's own check of the state pools: whether slots leaked, and the numbers.

    The scheduler makes it whenever it is idle (`SchedulerInvariantChecker._check_all_pools`), and
    stops a server that leaks. Where its own sum holds and this one does not, the index is what is
    wrong: it is silenced.
    """
    leaked, message = original(checker, stats)
    cache = checker.tree_cache
    side = scheduler_side_of(cache)
    if side is not None:
        read_all_reports(cache)
    reporting.report(cache)
    if side is None:
        return leaked, message
    found = accounts(cache, side, state_slots.count_slots_in_use(checker))
    message = "\n".join([message, *map(str, found)])
    if not leaked and not all(account.balanced for account in found):
        side.faults.give_up(f"the index and the pools disagree: {message}")
    return leaked, message
