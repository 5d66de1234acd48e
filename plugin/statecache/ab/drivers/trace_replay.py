"""Replays of the traces of a test, which its drivers share."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from statecache.ab.results import Played, Served
from statecache.replay.block_policies import make_block_policy
from statecache.replay.kv_residency import kv_timeline
from statecache.replay.prefix_tree import PrefixTree
from statecache.replay.schedule import make_schedule
from statecache.replay.shared_pool import Points, SharedPool
from statecache.replay.state_slots import serve
from statecache.trace.format import BLOCK_TOKENS

if TYPE_CHECKING:
    from statecache.ab.arms import Arm
    from statecache.ab.workloads import Workload
    from statecache.replay.kv_residency import KvTimeline
    from statecache.replay.schedule import ReplaySchedule
    from statecache.trace.format import Trace

__all__ = ["SharedReplays", "TraceReplay"]


class SharedReplays:
    """The replay of the last workload that was asked for; cells that follow each other share it.

    It may be asked from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: tuple[Workload, int, TraceReplay] | None = None

    def of(self, workload: Workload, seed: int) -> TraceReplay:
        """Return the replay of a workload. Raises `SettingsError` if it cannot be made."""
        with self._lock:
            if self._last is None or self._last[:2] != (workload, seed):
                self._last = (workload, seed, TraceReplay(workload.trace(seed)))
            return self._last[2]


class TraceReplay:
    """Plays arms on one trace; what the trace fixes is worked out once for all of them."""

    def __init__(self, trace: Trace) -> None:
        self._tree = PrefixTree.of(trace)
        self._timelines: dict[int, KvTimeline] = {}
        self._schedules: dict[tuple[int, str, int], ReplaySchedule] = {}

    @property
    def prompts(self) -> list[list[int]]:
        """The prompts as lists of blocks, which are equal only where prefixes agree."""
        return self._tree.paths

    def play(self, arm: Arm) -> Played:
        """Serve the requests one after the other."""
        if arm.pool == "shared":
            return self._play_shared(arm)
        key = (arm.kv_tokens, arm.admission, arm.chunk)
        if arm.kv_tokens not in self._timelines:
            self._timelines[arm.kv_tokens] = kv_timeline(self._tree, arm.kv_tokens or None)
        timeline = self._timelines[arm.kv_tokens]
        if key not in self._schedules:
            self._schedules[key] = make_schedule(self._tree, timeline, arm.admission, arm.chunk)
        hits, evicted = serve(self._schedules[key], arm.policy, arm.states, arm.cost_model())
        found = iter(zip(self._schedules[key].requests, hits, strict=True))
        served = []
        for path, resident in zip(self._tree.paths, timeline.resident, strict=True):
            if resident < 0:
                served.append(_rejected(len(path)))
            else:
                request, hit = next(found)
                served.append(Served(request.prompt_tokens, request.resident_tokens, hit))
        return Played(served, evicted, 0)

    def _play_shared(self, arm: Arm) -> Played:
        points = Points.of(arm.admission, arm.chunk // BLOCK_TOKENS)
        pool = SharedPool(
            arm.pool_blocks, int(arm.state_blocks), make_block_policy(arm.policy), points
        )
        served = []
        for path in self._tree.paths:
            found = pool.serve(path)
            if found is None:
                served.append(_rejected(len(path)))
            else:
                served.append(Served.of_blocks(found.blocks, found.reached, found.hit))
        return Played(served, pool.evicted_states, 0)


def _rejected(blocks: int) -> Served:
    return Served(blocks * BLOCK_TOKENS, 0, 0, rejected=True)
