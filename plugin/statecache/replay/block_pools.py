"""Replay of a recorded workload on a pool of blocks: one for all, or with slots for states."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import msgspec

from statecache import CostModel
from statecache.errors import SettingsError
from statecache.index.admissions import current_admission
from statecache.index.policies import DEFAULT_WITHOUT_PROMPTS, make_index, pool_policy_names
from statecache.replay.block_policies import (
    current_block_policy,
    earlier_block_policy,
    make_block_policy,
)
from statecache.replay.leaf_kv import LeafLruKv
from statecache.replay.prefix_tree import PreorderTree
from statecache.replay.shared_pool import Points, SharedPool
from statecache.replay.split_pool import SplitPool
from statecache.replay.state_slots import Totals
from statecache.replay.weighted_gds import WeightedGds
from statecache.trace.format import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from statecache.replay.prefix_tree import PrefixTree
    from statecache.replay.settings import PoolSettings
    from statecache.replay.split_pool import States

__all__ = [
    "PoolRow",
    "SlotRule",
    "kv_blocks_beside",
    "pool_rows",
    "replay_pool",
    "replay_slots",
]


class PoolRow(Totals, frozen=True):
    """The totals of a replay on a pool of blocks; they come last.

    `block_policy` rules a shared pool (`order` is the same by the names of before, for one
    release); states with slots of their own follow `policy`.
    """

    pool_blocks: int
    state_blocks: float
    block_policy: str | None
    checkpoint_slots: int | None
    policy: str | None
    admission: str
    order: str | None


def pool_rows(tree: PrefixTree, settings: PoolSettings) -> Iterator[PoolRow]:
    """Play every combination that was asked for."""
    cost = CostModel(settings.cost.linear, settings.cost.quadratic)
    every = settings.chunk_tokens // BLOCK_TOKENS
    state = settings.state_blocks
    preorder = None if settings.checkpoint_slots is None else PreorderTree.of(tree)
    for admission in settings.admissions:
        for blocks in settings.pool_blocks:
            for name in settings.block_policies or ():
                yield replay_pool(tree, blocks, name, admission, int(state), every, cost)
            if preorder is None:
                continue
            for slots in settings.checkpoint_slots or ():
                for policy in settings.policies or ():
                    rule = SlotRule(policy)
                    yield replay_slots(preorder, blocks, slots, rule, admission, state, every, cost)


def replay_pool(
    tree: PrefixTree,
    pool_blocks: int,
    block_policy: str,
    admission: str = "branch-points",
    state_blocks: int = 3,
    every_blocks: int = 16,
    cost: CostModel | None = None,
) -> PoolRow:
    """Serve the requests one after the other from one pool that KV and states share."""
    points = Points.of(admission, every_blocks)
    pool = SharedPool(pool_blocks, state_blocks, make_block_policy(block_policy), points)
    name = current_block_policy(block_policy)
    return PoolRow(
        pool_blocks=pool_blocks,
        state_blocks=state_blocks,
        block_policy=name,
        checkpoint_slots=None,
        policy=None,
        admission=current_admission(admission),
        order=earlier_block_policy(name),
        **_play(pool, tree.paths, cost or CostModel()),
    )


class SlotRule(msgspec.Struct, frozen=True):
    """What rules slots: a policy, and two settings to compare with that engines do not have.

    `interior_weight` counts the gain of a state with others below it so many times (gds);
    `queue_ratio` is that of `LeafLruKv`.
    """

    policy: str = DEFAULT_WITHOUT_PROMPTS
    interior_weight: float = 1
    queue_ratio: float = 1

    def states(self, cost: CostModel) -> States:
        """Return an empty index of states under this rule."""
        known = pool_policy_names()
        if self.policy not in known:
            raise SettingsError(f"unknown policy {self.policy!r}: use {', '.join(known)}")
        if self.policy == "gds" and self.interior_weight != 1:
            return WeightedGds(self.interior_weight, cost)
        return make_index(self.policy, cost)


def replay_slots(
    tree: PreorderTree,
    pool_blocks: int,
    slots: int,
    rule: SlotRule,
    admission: str = "dense",
    state_blocks: float = 3,
    every_blocks: int = 16,
    cost: CostModel | None = None,
) -> PoolRow:
    """Serve the requests one after the other with states in slots of their own.

    Each takes the bytes of `state_blocks` blocks from the pool, in all rounded up to blocks.
    """
    cost = cost or CostModel()
    kv_blocks = kv_blocks_beside(pool_blocks, slots, state_blocks)
    kv = LeafLruKv(tree.parents, kv_blocks, _exact(rule.queue_ratio))
    points = Points.of(admission, every_blocks)
    own = SplitPool(tree, kv, slots, rule.states(cost), points)
    return PoolRow(
        pool_blocks=pool_blocks,
        state_blocks=state_blocks,
        block_policy=None,
        checkpoint_slots=slots,
        policy=rule.policy,
        admission=current_admission(admission),
        order=None,
        **_play(own, tree.paths, cost),
    )


def kv_blocks_beside(pool_blocks: int, slots: int, state_blocks: float) -> int:
    """Return how many blocks `slots` states leave to KV; `SettingsError` if none."""
    left = math.floor(pool_blocks - slots * _exact(state_blocks))
    if left < 1:
        raise SettingsError(
            f"{slots} slots of {state_blocks:g} blocks leave none of {pool_blocks} to KV"
        )
    return left


def _exact(number: float) -> Fraction:
    """Return the fraction that the decimal digits of `number` say."""
    return Fraction(str(number))


def _play(
    pool: SharedPool | SplitPool, paths: Sequence[Sequence[int]], cost: CostModel
) -> dict[str, Any]:
    served = [found for path in paths if (found := pool.serve(path))]
    hit = sum(found.hit for found in served) * BLOCK_TOKENS
    resident = sum(found.reached for found in served) * BLOCK_TOKENS
    totals = Totals(
        requests=len(served),
        rejected=len(paths) - len(served),
        prompt_tokens=sum(found.blocks for found in served) * BLOCK_TOKENS,
        hit_tokens=hit,
        resident_tokens=resident,
        missed_by_state_tokens=resident - hit,
        recompute_cost=sum(
            cost.cost(found.hit * BLOCK_TOKENS, found.blocks * BLOCK_TOKENS) for found in served
        ),
        evicted_states=pool.evicted_states,
    )
    return msgspec.structs.asdict(totals)
