"""What a replay was asked for, as its report says it."""

from __future__ import annotations

import msgspec

__all__ = ["CostSettings", "PoolSettings", "ReplaySettings"]


class CostSettings(msgspec.Struct, frozen=True):
    """The coefficients of the cost model."""

    linear: float
    quadratic: float


class ReplaySettings(msgspec.Struct, frozen=True):
    """What was asked for; None is unlimited KV, or no limit on requests."""

    policies: list[str]
    slots: list[int]
    admissions: list[str]
    kv_tokens: int | None
    chunk_tokens: int
    limit: int | None
    cost: CostSettings

    @property
    def combinations(self) -> int:
        """The number of rows."""
        return len(self.policies) * len(self.slots) * len(self.admissions)


class PoolSettings(msgspec.Struct, frozen=True):
    """What was asked of a pool of blocks; what does not apply is None.

    With `checkpoint_slots` states are ruled by `policies`, else all blocks by `block_policies`.
    `orders` is the same by the names of before, `interior_weight` and `queue_ratio` are options
    that there were: they stay for one release.
    """

    pool_blocks: list[int]
    state_blocks: float
    block_policies: list[str] | None
    checkpoint_slots: list[int] | None
    policies: list[str] | None
    admissions: list[str]
    chunk_tokens: int
    limit: int | None
    cost: CostSettings
    orders: list[str] | None
    interior_weight: None = None
    queue_ratio: None = None

    @property
    def combinations(self) -> int:
        """The number of rows."""
        each = len(self.block_policies or ()) or len(self.checkpoint_slots or ()) * len(
            self.policies or ()
        )
        return len(self.pool_blocks) * len(self.admissions) * each
