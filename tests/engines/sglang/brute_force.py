"""GreedyDual-Size worked out from SGLang's tree alone, recomputing everything every time.

`WatchedTraffic` notes each use a scheduler can see (a match, a cached state, a load from the host,
the last release) and, at each step of a walk over states, goes through the whole Python tree for
the state that must go. States that live on the host alone count as shallower neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

from cache_layer import MAMBA, Traffic
from host_layer import HostTraffic

LINEAR, QUADRATIC = 1.862e-5, 3.33e-6


def cost(a: int, b: int) -> float:
    return LINEAR * (b - a) + QUADRATIC * (b * b - a * a) / 2e5


@dataclass
class Use:
    stamp: float
    number: int


class Watched:
    """Traffic on the Python tree core that predicts every eviction of a state."""

    def __init__(self, core: str, *args, **options):
        super().__init__(core, *args, **options)
        self.component = self.core.components_by_type[MAMBA]
        self.evictions = 0
        self.forget_everything()
        self.watch()

    def forget_everything(self) -> None:
        self.uses: dict[int, Use] = {}
        self.number = 0
        self.watermark = 0.0
        self.chosen: set[int] = set()
        self.dropped: int | None = None

    def data(self, node_id: int):
        return self.core.node_by_id(node_id).component_data[MAMBA]

    def use(self, node_id: int) -> None:
        if self.data(node_id).value is not None:
            self.number += 1
            self.uses[node_id] = Use(self.watermark, self.number)

    def priorities(self) -> dict[int, tuple[float, int]]:
        """Of every state on the device that is not locked: its priority and last use."""
        places, candidates = {}, []
        stack = [(self.core.root_node, 0, ())]
        while stack:
            node, above_depth, above = stack.pop()
            depth = above_depth + len(node.key)
            data = node.component_data[MAMBA]
            if data.value is not None or data.host_value is not None:
                places[node.id] = depth
            if data.value is not None and data.lock_ref == 0:
                candidates.append((node.id, depth, above))
            stack += [(child, depth, (node.id, *above)) for child in node.children.values()]
        ranked = {}
        for node_id, depth, above in candidates:
            shallower = next((places[a] for a in above if a in places), 0)
            use = self.uses[node_id]
            ranked[node_id] = (use.stamp + cost(shallower, depth), use.number)
        return ranked

    def watch(self) -> None:
        """Have every walk over states, and every state that leaves the device, seen."""
        start, step = self.component._evict_device_start, self.component._evict_device_next_node
        evict = self.component.evict_component

        def watched_start(count):
            self.chosen.clear()
            start(count)

        def watched_step(tracker, *sinks, **more):
            ranked = {n: p for n, p in self.priorities().items() if n not in self.chosen}
            self.dropped = None
            found = step(tracker, *sinks, **more)
            took = self.dropped if found is None else getattr(found, "node_id", found)
            if took is not None and ranked:
                assert took == min(ranked, key=ranked.get)
            elif took is None and ranked:
                assert tracker[MAMBA] >= self.component._evict_device_request_cnt
            return found

        def watched_evict(node, *args, **more):
            data = node.component_data[MAMBA]
            priority = self.priorities().get(node.id) if data.value is not None else None
            freed = evict(node, *args, **more)
            if priority is not None and data.value is None:
                self.left(node.id, priority[0])
            return freed

        self.component._evict_device_start = watched_start
        self.component._evict_device_next_node = watched_step
        self.component.evict_component = watched_evict

    def left(self, node_id: int, priority: float) -> None:
        self.dropped = node_id
        if self.component.is_evict_device_ongoing:
            self.watermark = max(self.watermark, priority)
            self.evictions += 1
            self.chosen.add(node_id)

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
        if self.data(lock[0]).lock_ref == 0:
            self.use(lock[0])

    def check(self) -> None:
        super().check()
        assert self.core.scheduler_side.registry.watermark == self.watermark
        ranked = self.priorities()
        assert ranked == {
            n: (self.core.scheduler_side.registry.priority(n), u) for n, (_, u) in ranked.items()
        }

    def flush(self) -> None:
        super().flush()
        self.forget_everything()


class WatchedTraffic(Watched, Traffic):
    """Without a host tier."""


class WatchedHostTraffic(Watched, HostTraffic):
    """With a host tier: a copy to it is no use, a load from it is one."""

    def load_back(self, match):
        loaded = super().load_back(match)
        self.use(match.best_match_node)
        return loaded

    def unlock(self, lock) -> None:
        super(Watched, self).unlock(lock)
        self.released(lock[0])

    def released(self, node_id: int) -> None:
        copying = self.cache.ongoing_write_through.get(node_id)
        held_by_copy = copying is not None and copying.lock_params is not None
        if self.data(node_id).lock_ref == held_by_copy:
            self.use(node_id)

    def events(self) -> None:
        loading = list(self.cache.ongoing_load_back)
        super().events()
        for node_id in loading:
            if node_id not in self.cache.ongoing_load_back:
                self.released(node_id)
