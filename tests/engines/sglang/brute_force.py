"""GreedyDual-Size worked out from SGLang's tree alone, recomputing everything every time.

`WatchedTraffic` notes each use a scheduler can see (a match, a cached state, the last release)
and, before anything is evicted, walks the whole Python tree for the states that must go.
"""

from __future__ import annotations

from dataclasses import dataclass

from cache_layer import MAMBA, Traffic

LINEAR, QUADRATIC = 1.862e-5, 3.33e-6


def cost(a: int, b: int) -> float:
    return LINEAR * (b - a) + QUADRATIC * (b * b - a * a) / 2e5


@dataclass
class Use:
    stamp: float
    number: int


class WatchedTraffic(Traffic):
    """Traffic on the Python tree core that predicts every eviction of a state."""

    def __init__(self, core: str, **options):
        super().__init__(core, **options)
        self.forget_everything()
        self.evictions = 0

    def forget_everything(self) -> None:
        self.uses: dict[int, Use] = {}
        self.number = 0
        self.watermark = 0.0

    def use(self, node_id: int) -> None:
        node = self.core.node_by_id(node_id)
        if node.component_data[MAMBA].value is not None:
            self.number += 1
            self.uses[node_id] = Use(self.watermark, self.number)

    def states(self) -> dict[int, tuple[int, tuple[int, ...], bool]]:
        """Every state in the tree: its depth, the nodes above it nearest first, its lock."""
        found = {}
        stack = [(self.core.root_node, 0, ())]
        while stack:
            node, above_depth, above = stack.pop()
            depth = above_depth + len(node.key)
            data = node.component_data[MAMBA]
            if data.value is not None:
                found[node.id] = (depth, above, data.lock_ref > 0)
            stack += [(child, depth, (node.id, *above)) for child in node.children.values()]
        return found

    def victims(self, count: int) -> set[int]:
        """The states that must go, one after the other; raises the watermark."""
        states = self.states()
        gone: set[int] = set()
        while len(gone) < count:
            ranked = []
            for node, (depth, above, locked) in states.items():
                if not locked:
                    shallower = next((states[a][0] for a in above if a in states), 0)
                    use = self.uses[node]
                    ranked.append((use.stamp + cost(shallower, depth), use.number, node))
            if not ranked:
                break
            priority, _, victim = min(ranked)
            self.watermark = max(self.watermark, priority)
            del states[victim]
            gone.add(victim)
        return gone

    def match(self, tokens, **namespace):
        result = super().match(tokens, **namespace)
        self.use(result.best_match_node)
        return result

    def insert(self, *args, **namespace):
        result = super().insert(*args, **namespace)
        self.use(result.last_device_node)
        return result

    def unlock(self, lock) -> None:
        super().unlock(lock)
        if self.core.node_by_id(lock[0]).component_data[MAMBA].lock_ref == 0:
            self.use(lock[0])

    def evict(self, states: int = 0, kv_tokens: int = 0) -> int:
        assert not (states and kv_tokens)
        before = set(self.states())
        expected = self.victims(states)
        super().evict(states, kv_tokens)
        gone = before - set(self.states())
        if states:
            assert gone == expected
            assert self.core.advisor.book.watermark == self.watermark
            self.evictions += len(gone)
        return len(gone)

    def flush(self) -> None:
        super().flush()
        self.forget_everything()
