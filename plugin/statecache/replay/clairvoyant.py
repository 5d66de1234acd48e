"""An offline reference that sees the whole trace: how far from the possible a policy is."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from statecache.replay.schedule import ReplaySchedule

__all__ = ["ClairvoyantPolicy"]


class ClairvoyantPolicy:
    """Replays a schedule with `slots` states, knowing every later request.

    After each request it keeps, of the resident states and those the request may set, the `slots`
    ones that save the most tokens per request waited for: a state is worth (tokens it will save at
    the next request that resumes from it) / (requests until then), where a request resumes from the
    deepest state kept on its path, and saves what lies beyond the next shallower one. The least
    worth goes first, one at a time, and what is left is valued again, since a state's worth depends
    on its neighbours. A state that is not worth its slot is not set at all.

    This is Belady's rule weighted by tokens. It is greedy, looks at one use of each state and does
    not plan jointly: it is no optimum and proves no bound. On the recorded workloads it was never
    below lru or gds; on a contrived one it may be. Hits are counted in tokens, so the cost model
    does not matter to it. Under limited KV it knows when a state's KV will go.
    """

    def __init__(self, schedule: ReplaySchedule, slots: int) -> None:
        self._schedule = schedule
        self._slots = slots
        # By candidate: requests that may resume there, and those that drop its KV.
        self._uses: list[list[int]] = [[] for _ in schedule.depths]
        self._drops: list[list[int]] = [[] for _ in schedule.depths]
        for now, request in enumerate(schedule.requests):
            for c in request.resumable:
                self._uses[c].append(now)
            for c in request.dropped:
                self._drops[c].append(now)
        self._above = _nearest_above(schedule.last)
        self._resident = bytearray(len(schedule.depths))
        # By state: the next request to resume from it, and the tokens it saves there.
        self._needs: dict[int, tuple[int, int]] = {}
        self._idle: set[int] = set()  # resident states that nothing will resume as things are
        self._stale: set[int] = set()  # resident states in neither, to value again
        self._held = 0

    def play(self) -> tuple[list[int], int]:
        """Return the tokens hit by each request, and how many states were evicted."""
        hits = []
        evicted = 0
        for now, request in enumerate(self._schedule.requests):
            hit = next(filter(self._resident.__getitem__, request.resumable), -1)
            hits.append(self._schedule.depths[hit] if hit >= 0 else 0)
            for c in request.resumable:  # what each was waiting for is now, the pinned one's too
                if self._resident[c]:
                    self._forget_worth(c)
            for c in request.dropped:
                if self._resident[c]:
                    self._remove(c)
            offered = {
                c
                for c in request.admitted[bisect_right(request.admitted, hit) :]
                if not self._resident[c] and self._next_use(c, now) is not None
            }
            for c in sorted(offered):
                self._add(c)
            evicted += self._trim(now, hit, offered)
        return hits, evicted

    def _trim(self, now: int, pinned: int, offered: set[int]) -> int:
        evicted = 0
        while self._held > self._slots:
            if not self._idle:
                self._revalue(now, pinned)
            victim = (
                min(self._idle)
                if self._idle
                else min((gain / (use - now), c) for c, (use, gain) in self._needs.items())[1]
            )
            self._remove(victim)
            evicted += victim not in offered
        return evicted

    def _next_use(self, c: int, now: int) -> int | None:
        """Return where in `_uses[c]` the uses that a state held now can serve begin, if any."""
        position = bisect_right(self._uses[c], now)
        if position == len(self._uses[c]) or self._uses[c][position] > self._lost_at(c, now):
            return None
        return position

    def _lost_at(self, c: int, now: int) -> int:
        """Return the request after `now` that drops the KV under `c`."""
        position = bisect_right(self._drops[c], now)
        drops = self._drops[c]
        return drops[position] if position < len(drops) else len(self._schedule.requests)

    def _forget_worth(self, c: int) -> None:
        self._stale.add(c)
        self._needs.pop(c, None)
        self._idle.discard(c)

    def _revalue(self, now: int, pinned: int) -> None:
        """Value what is stale, but for the pinned state, which so is no victim."""
        self._stale.discard(pinned)
        for c in self._stale:
            need = self._need(c, now)
            if need is None:
                self._idle.add(c)
            else:
                self._needs[c] = need
        self._stale.clear()
        if pinned >= 0:
            self._stale.add(pinned)

    def _need(self, c: int, now: int) -> tuple[int, int] | None:
        """Return the next request that would resume from `c`, and the tokens it would save."""
        first = self._next_use(c, now)
        if first is None:
            return None
        depths, is_resident = self._schedule.depths, self._resident.__getitem__
        lost_at = self._lost_at(c, now)
        for position in range(first, len(self._uses[c])):
            request = self._uses[c][position]
            if request > lost_at:
                return None
            kept = filter(is_resident, self._schedule.requests[request].resumable)
            if next(kept) == c:
                shallower = next(kept, -1)
                return request, depths[c] - (depths[shallower] if shallower >= 0 else 0)
        return None

    def _add(self, c: int) -> None:
        self._resident[c] = 1
        self._held += 1
        self._stale.add(c)
        self._neighbours_changed(c)

    def _remove(self, c: int) -> None:
        self._resident[c] = 0
        self._held -= 1
        self._needs.pop(c, None)
        self._idle.discard(c)
        self._stale.discard(c)
        self._neighbours_changed(c)

    def _neighbours_changed(self, c: int) -> None:
        """Mark the states whose worth may depend on `c`: those above and those below it."""
        above = self._above[c]
        while above >= 0:
            if self._resident[above]:
                self._forget_worth(above)
            above = self._above[above]
        end = self._schedule.last[c] + 1
        below = self._resident.find(1, c + 1, end)
        while below >= 0:
            self._forget_worth(below)
            below = self._resident.find(1, below + 1, end)


def _nearest_above(last: list[int]) -> list[int]:
    """Return for each candidate the nearest one above it, or -1."""
    above = []
    open_: list[int] = []
    for c in range(len(last)):
        while open_ and last[open_[-1]] < c:
            open_.pop()
        above.append(open_[-1] if open_ else -1)
        open_.append(c)
    return above
