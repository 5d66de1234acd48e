"""Pools of blocks on prompts of letters, for the tests: a letter is a block."""

from fractions import Fraction

from statecache import CostModel
from statecache.replay.block_policies import make_block_policy
from statecache.replay.block_pools import SlotRule
from statecache.replay.leaf_kv import LeafLruKv
from statecache.replay.prefix_tree import PrefixTree, PreorderTree
from statecache.replay.shared_pool import Points, Served, SharedPool
from statecache.replay.split_pool import SplitPool
from support.replay_support import trace_of


def tree_of(prompts: str) -> PrefixTree:
    return PrefixTree.of(trace_of([[ord(letter) for letter in p] for p in prompts.split()]))


class Shared:
    """A pool with room for `blocks`, and what its requests found: (reached, hit) or None."""

    def __init__(
        self,
        blocks: int,
        block_policy: str = "fifo",
        state_blocks: int = 1,
        admission: str = "ends",
        every: int = 2,
        ratio: int | None = None,
    ) -> None:
        make = make_block_policy(block_policy, None if ratio is None else Fraction(ratio))
        self.driver = SharedPool(blocks, state_blocks, make, Points.of(admission, every))

    def play(self, prompts: str) -> list[tuple[int, int] | None]:
        return [pair(self.driver.serve(path)) for path in tree_of(prompts).paths]

    def free_blocks(self) -> list[int]:
        return self.driver.pool.policy.free_blocks()


def play_slots(
    prompts: str,
    kv_blocks: int,
    slots: int,
    policy: str = "lru",
    admission: str = "ends",
    every: int = 2,
    ratio: int = 1,
) -> tuple[list[tuple[int, int] | None], int]:
    """Return what each request found, and the number of states evicted."""
    tree = PreorderTree.of(tree_of(prompts))
    own = SplitPool(
        tree,
        LeafLruKv(tree.parents, kv_blocks, Fraction(ratio)),
        slots,
        SlotRule(policy).states(CostModel()),
        Points.of(admission, every),
    )
    return [pair(own.serve(path)) for path in tree.paths], own.evicted_states


def pair(found: Served | None) -> tuple[int, int] | None:
    return None if found is None else (found.reached, found.hit)
