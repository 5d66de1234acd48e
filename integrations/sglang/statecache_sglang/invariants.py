"""active + cached + free = total, for each state pool, at any idle moment.

SGLang 0.5.23 adds up its own counters. Here the cached states are those of the index and the
active ones those that the requests say they hold, so that neither can drift unseen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from statecache_sglang import pool_seams, reporting


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


def accounts(cache: Any, active: int) -> list[Account]:
    """Return the pools of a cache the index leads; none where it does not, or no longer."""
    advisor = getattr(cache.tree_core, "advisor", None)
    if advisor is None or not advisor.active:
        return []
    cached = len(advisor.book)
    total, free, checkpoints = pool_seams.pool_sizes(cache)
    if checkpoints is None:
        return [Account("states", total, active, cached, free)]
    return [
        Account("states", total, active, 0, free),
        Account("int8 states", checkpoints.num_slots, 0, cached, int(checkpoints.available_size())),
    ]


def check_state_pools(
    original: Callable[..., tuple[bool, str]], checker: Any, stats: Any
) -> tuple[bool, str]:
    """Around SGLang's own check of the state pools: whether slots leaked, and the numbers.

    SGLang stops a server that leaks. Where its own sum holds and this one does not, the index is
    what is wrong: it is silenced.
    """
    leaked, message = original(checker, stats)
    cache = checker.tree_cache
    reporting.report(cache)
    found = accounts(cache, pool_seams.slots_in_use(checker))
    message = "\n".join([message, *map(str, found)])
    if not leaked and not all(account.balanced for account in found):
        cache.tree_core.advisor.give_up(f"the index and the pools disagree: {message}")
    return leaked, message
