"""Random workloads on pools of blocks: nothing is lost or doubled, and weights act as defined."""

import random

from statecache import CostModel, ReferenceCost, ReferenceIndex
from statecache.index.admissions import POOL, admission_names
from statecache.replay.block_policies import block_policy_names, make_block_policy
from statecache.replay.block_pools import SlotRule
from statecache.replay.leaf_kv import LeafLruKv
from statecache.replay.prefix_tree import PrefixTree, PreorderTree
from statecache.replay.shared_pool import BlockPool, Points, SharedPool
from statecache.replay.split_pool import SplitPool
from statecache.replay.weighted_gds import WeightedGds
from support.replay_support import trace_of


def random_tree(rng: random.Random, requests: int) -> PrefixTree:
    """Prompts that continue, fork off or repeat earlier ones."""
    prompts: list[list[int]] = []
    for _ in range(requests):
        start = rng.choice(prompts) if prompts and rng.random() < 0.8 else []
        kept = start[: rng.randint(0, len(start))] if rng.random() < 0.5 else start
        fresh = [rng.randint(0, 2) for _ in range(rng.randint(0 if kept else 1, 20))]
        prompts.append((kept + fresh)[:60])
    return PrefixTree.of(trace_of(prompts))


def check_blocks(pool: BlockPool, blocks: int) -> None:
    """Each block is in use or free, once; each key leads to its blocks and back."""
    free = pool.policy.free_blocks()
    in_use = [block for block in range(blocks) if pool.uses[block]]
    assert sorted(free + in_use) == list(range(blocks))
    assert len(pool.policy) == len(free)
    by_key = sorted(block for same in pool.cached.values() for block in same)
    assert by_key == [block for block in range(blocks) if pool.keys[block]]
    assert all(pool.keys[block] == key for key, same in pool.cached.items() for block in same)


def test_no_block_is_lost_or_doubled(share: float) -> None:
    checks = 0
    for seed in range(int(60 * share)):
        rng = random.Random(seed)
        blocks, parts = rng.randint(20, 150), rng.randint(1, 3)
        make = make_block_policy(block_policy_names()[seed % 3])
        points = Points.of(rng.choice(admission_names(POOL)), rng.randint(1, 20))
        driver = SharedPool(blocks, parts, make, points)
        allocate = driver.pool.allocate

        def checked(count: int, *, protected: bool) -> list[int]:
            taken = allocate(count, protected=protected)  # noqa: B023
            check_blocks(driver.pool, blocks)  # noqa: B023
            return taken

        driver.pool.allocate = checked  # type: ignore[method-assign]
        for path in random_tree(rng, 60).paths:
            found = driver.serve(path)
            fits = len(path) + 1 + 2 * parts <= blocks
            assert (found is not None) == fits
            assert found is None or 0 <= found.hit <= found.reached < found.blocks
            check_blocks(driver.pool, blocks)
            assert not any(driver.pool.uses)
            checks += 1
    assert checks == int(60 * share) * 60


def test_kv_beside_slots_stays_within_bounds_and_whole(share: float) -> None:
    dropped = evicted = 0
    for seed in range(int(60 * share)):
        rng = random.Random(seed)
        tree = PreorderTree.of(random_tree(rng, 60))
        capacity, slots = rng.randint(10, 100), rng.randint(1, 12)
        kv = LeafLruKv(tree.parents, capacity)
        states = SlotRule("gds", rng.choice((0.2, 1))).states(CostModel())
        points = Points.of(rng.choice(admission_names(POOL)), rng.randint(1, 20))
        own = SplitPool(tree, kv, slots, states, points)
        for path in tree.paths:
            own.serve(path)
            resident = {node for node, stamp in enumerate(kv._stamps) if stamp >= 0}
            assert len(resident) == kv._used_blocks <= capacity
            assert all(tree.parents[node] in resident | {0} for node in resident)
            held = {node for node, here in enumerate(own._resident) if here}
            assert held == set(kv._uses) <= resident
            assert len(held) == len(states) <= slots
        dropped += len(tree.parents) - 1 - len(resident)
        evicted += own.evicted_states
    assert dropped > 0
    assert evicted > 0


class InteriorReference(ReferenceIndex):
    """The weight, from its definition."""

    def __init__(self, weight: float) -> None:
        super().__init__("gds", ReferenceCost())
        self.weight = weight

    def _priority(self, state):
        gain = self._cost.cost(state.parent.depth if state.parent else 0, state.depth)
        return state.stamp + (self.weight * gain if state.children else gain)


def test_weighted_states_evict_as_defined(share: float) -> None:
    """20,000 events: random trees of states, with pins; the victims and priorities are the same."""
    victims = 0
    for seed in range(10):
        rng = random.Random(seed)
        weight = (0, 0.05, 0.2, 0.5, 1)[seed % 5]
        weighted, reference = WeightedGds(weight, CostModel()), InteriorReference(weight)
        depths: dict[int, int] = {}
        pinned: set[int] = set()
        for event in range(int(2_000 * share)):
            chosen = rng.choice(list(depths)) if depths else None
            kind = rng.choice(("insert", "insert", "touch", "pin", "unpin", "erase", "evict"))
            if kind == "insert":
                parent = rng.choice((chosen, None))
                above = depths[parent] if parent is not None else 0
                depth = above + rng.randint(1, 9) * 512
                siblings = [
                    s.id
                    for s in reference._states.values()
                    if (s.parent.id if s.parent else None) == parent and s.depth > depth
                ]
                below = rng.sample(siblings, rng.randint(0, min(2, len(siblings))))
                for index in (weighted, reference):
                    index.insert(event, depth, parent, below)
                depths[event] = depth
            elif kind == "evict":
                gone = reference.evict(1)
                assert weighted.evict(1) == gone
                victims += len(gone)
                for state in gone:
                    del depths[state]
            elif chosen is not None and (kind == "unpin") == (chosen in pinned):
                for index in (weighted, reference):
                    getattr(index, kind)(chosen)
                if kind == "pin":
                    pinned.add(chosen)
                pinned -= {chosen} if kind == "unpin" else set()
                if kind == "erase":
                    del depths[chosen]
        assert all(weighted.priority(s) == reference.priority(s) for s in depths)
        assert len(weighted) == len(reference) == len(depths)
    assert victims > 500 * share
