"""Replay of a recorded workload on a pool of blocks: one for all, or with slots for states."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

import msgspec

from statecache import CostModel
from statecache.errors import SettingsError
from statecache.index.admissions import current_admission
from statecache.index.policies import DEFAULT, make_index, pool_policy_names
from statecache.replay.block_policies import (
    current_block_policy,
    earlier_block_policy,
    make_block_policy,
)
from statecache.replay.leaf_kv import LeafLruKv
from statecache.replay.prefix_tree import PreorderTree
from statecache.replay.shared_pool import Points, SharedPool
from statecache.replay.split_pool import SplitPool
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


class _Pool(msgspec.Struct, frozen=True):
    pool_blocks: int
    state_blocks: float
    block_policy: str | None
    checkpoint_slots: int | None
    policy: str | None
    admission: str


class PoolRow(_Pool, frozen=True):
    """Totals of one replay; tokens in whole blocks of 512. Rejected requests count nowhere else.

    `block_policy` rules a shared pool (`order` is the same by the names of before, for one
    release); states with slots of their own follow `policy`.
    """

    order: str | None
    requests: int
    rejected: int
    prompt_tokens: int
    hit_tokens: int
    resident_tokens: int
    missed_by_state_tokens: int
    recompute_cost: float
    evicted_states: int


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
    asked = _Pool(pool_blocks, state_blocks, name, None, None, current_admission(admission))
    return _play(pool, tree.paths, asked, cost or CostModel())


class SlotRule(msgspec.Struct, frozen=True):
    """What rules slots: a policy, and two settings to compare with that engines do not have.

    `interior_weight` counts the gain of a state with others below it so many times (gds);
    `queue_ratio` is that of `LeafLruKv`.
    """

    policy: str = DEFAULT
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
    name = current_admission(admission)
    asked = _Pool(pool_blocks, state_blocks, None, slots, rule.policy, name)
    return _play(own, tree.paths, asked, cost)


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
    pool: SharedPool | SplitPool, paths: Sequence[Sequence[int]], asked: _Pool, cost: CostModel
) -> PoolRow:
    served = [found for path in paths if (found := pool.serve(path))]
    hit = sum(found.hit for found in served) * BLOCK_TOKENS
    resident = sum(found.reached for found in served) * BLOCK_TOKENS
    return PoolRow(
        pool_blocks=asked.pool_blocks,
        state_blocks=asked.state_blocks,
        block_policy=asked.block_policy,
        order=asked.block_policy and earlier_block_policy(asked.block_policy),
        checkpoint_slots=asked.checkpoint_slots,
        policy=asked.policy,
        admission=asked.admission,
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
