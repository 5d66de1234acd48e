"""A stand-in for a GPU that runs behind the host: what became of a store is known late.

As with SGLang's overlap of batches: a copy waits for the batch that was launched last, and the host
knows that a batch is through when it takes its result. `SpeculativeLoop` makes and takes both.
"""

from __future__ import annotations

import torch
from speculative_loop import SpeculativeLoop

from support.host_waits import StandInEvent


class LateDevice:
    """The order of the copies of the int8 pool under `loop`.

    `plant` is asked at each store whether its state is to hold NaN; `never` are the slots whose
    latest store did, which no load may name.
    """

    def __init__(self, loop: SpeculativeLoop, plant=lambda: False):
        self.loop, self.plant = loop, plant
        self.planted = 0
        self.never: set[int] = set()
        self._taken = 0
        self._behind: list[tuple[int, StandInEvent]] = []
        self._take, loop._take = loop._take, self._take_one
        self.pool = loop.traffic.requests.mamba_ckpt_pool
        self.pool._pool._order = self
        self._store, self.pool._pool.store = self.pool._pool.store, self._store_one
        self._load, self.pool._pool.load = self.pool._pool.load, self._load_one

    def begin(self) -> None:
        """A copy begins."""

    def end(self) -> StandInEvent:
        """A copy was launched; it is over with the batches that were launched before it."""
        event = StandInEvent()
        launched = self._taken + len(self.loop.in_flight)
        event.over = launched == self._taken
        self._behind.append((launched, event))
        return event

    def _take_one(self, *batch) -> None:
        self._taken += 1
        for launched, event in self._behind:
            event.over |= launched <= self._taken
        self._behind = [row for row in self._behind if not row[1].over]
        self._take(*batch)

    def _store_one(self, active, sources, slots):
        self.never.difference_update(slots)
        if not self.plant():
            return self._store(active, sources, slots)
        self.planted += 1
        self.never.update(slots)
        state = self.loop.traffic.requests.mamba_pool.mamba_cache.temporal[:, sources]
        states = self.loop.traffic.requests.mamba_pool.mamba_cache.temporal
        states[:, sources] = torch.full_like(state, float("nan"))
        try:
            return self._store(active, sources, slots)
        finally:
            states[:, sources] = state

    def _load_one(self, slots, active, targets) -> None:
        assert self.never.isdisjoint(map(int, slots)), "a state that was refused was restored"
        self._load(slots, active, targets)
