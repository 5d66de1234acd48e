"""What each policy would have reused on the traffic of a live server: a replay that runs along.

One KV pool, and for each policy an index without data, fed request by request. The numbers are
those of `statecache replay` over a recording of the same requests. What a prompt's blocks were is
forgotten with their KV, so memory is bounded by the KV pool.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from statecache import CostModel
from statecache.engine.metrics import BestEffort, MetricKey
from statecache.engine.settings import Settings
from statecache.index.policies import ENGINE, make_index, policy_names
from statecache.replay.kv_residency import KvPool
from statecache.replay.schedule import ScheduledRequest, admitted_blocks
from statecache.replay.state_slots import SlotSimulator
from statecache.trace.format import BLOCK_TOKENS
from statecache.trace.recorder import Observer

__all__ = ["ShadowReplay", "begin"]


_CHUNK_BLOCKS = 16  # as `statecache replay` sets states by default: every 8,192 tokens and the end
_ROOT = 0


class _Resident(dict[int, int]):
    """Which points have a state; those without take no room."""

    def __missing__(self, point: int) -> int:
        return 0

    def __setitem__(self, point: int, flag: int) -> None:
        if flag:
            super().__setitem__(point, flag)
        else:
            self.pop(point, None)


class _Tree:
    """The blocks whose KV is resident, by their ids; each id names a whole prefix."""

    def __init__(self, blocks: int) -> None:
        self._parents = [-1]  # by number: what the pool knows a block by
        self._ids = [0]
        self._numbers: dict[int, int] = {}
        self._unused: list[int] = []
        self._below: dict[int, dict[int, None]] = {}
        self._pool = KvPool(self._parents, blocks)
        self._requests = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def fits(self, blocks: int) -> bool:
        return blocks <= self._pool.capacity_blocks

    def admit(self, ids: Sequence[int]) -> tuple[int, list[int]]:
        """Make a prompt resident: how many of its blocks were, and what was dropped for it."""
        path: list[int] = []
        for block in ids:
            number = self._numbers.get(block)
            if number is None:
                break
            path.append(number)
        resident = len(path)
        for block in ids[resident:]:
            path.append(self._add(block, path[-1] if path else _ROOT))
        self._requests += 1
        dropped = self._pool.admit(self._requests, path, resident)
        return resident, [self._forget(number) for number in dropped]

    def _add(self, block: int, parent: int) -> int:
        if self._unused:
            number = self._unused.pop()
            self._parents[number], self._ids[number] = parent, block
        else:
            number = len(self._parents)
            self._parents.append(parent)
            self._ids.append(block)
        self._numbers[block] = number
        if parent != _ROOT:
            self._below.setdefault(self._ids[parent], {})[block] = None
        return number

    def _forget(self, number: int) -> int:
        block, parent = self._ids[number], self._parents[number]
        del self._numbers[block]
        self._below.pop(block, None)
        if parent != _ROOT and (siblings := self._below.get(self._ids[parent])):
            siblings.pop(block, None)
        self._unused.append(number)
        return block

    def directly_below(self, block: int, resident: _Resident) -> list[int]:
        """Return the blocks with a state below `block` with no other state in between."""
        found: list[int] = []
        left = list(self._below.get(block, ()))
        while left:
            block = left.pop()
            if resident[block]:
                found.append(block)
            else:
                left.extend(self._below.get(block, ()))
        return found


class ShadowReplay:
    """Replays requests as they come with `slots` states and `kv_tokens` of KV, by each policy."""

    def __init__(self, slots: int, kv_tokens: int, cost: CostModel) -> None:
        self.slots, self.kv_tokens = slots, kv_tokens
        self._tree = _Tree(max(kv_tokens // BLOCK_TOKENS, 1))
        self._depths: dict[int, int] = {}
        self._simulators = {
            policy: self._simulator(policy, cost) for policy in policy_names(ENGINE)
        }
        self._requests = self._rejected = 0
        self._prompt_tokens = self._resident_tokens = self._engine_tokens = 0
        self._hit_tokens = dict.fromkeys(self._simulators, 0)

    def _simulator(self, policy: str, cost: CostModel) -> SlotSimulator:
        resident = _Resident()
        return SlotSimulator(
            make_index(policy, cost, self.slots),
            self.slots,
            self._depths,
            resident,
            lambda block: self._tree.directly_below(block, resident),
        )

    def observe(self, ids: Sequence[int], cached_tokens: int) -> None:
        """A prompt of these blocks was served; the engine itself reused `cached_tokens`.

        `ids` are chained, as `BlockIds` makes them. Only whole blocks count, of the engine too.
        """
        if not ids:
            return
        if not self._tree.fits(len(ids)):
            self._rejected += 1
            return
        request = self._request(ids)
        for policy, simulator in self._simulators.items():
            self._hit_tokens[policy] += simulator.serve(request)
        self._requests += 1
        self._prompt_tokens += request.prompt_tokens
        self._resident_tokens += request.resident_tokens
        reused = min(cached_tokens // BLOCK_TOKENS, len(ids)) * BLOCK_TOKENS
        self._engine_tokens += max(reused, 0)

    def _request(self, ids: Sequence[int]) -> ScheduledRequest:
        """Return the request as a replay sees it, with every block a point.

        `learned` has to know where points lie before a state is set there.
        """
        blocks, depths = len(ids), self._depths
        resident, dropped = self._tree.admit(ids)
        for block in dropped:
            del depths[block]
        depths.update((ids[at], (at + 1) * BLOCK_TOKENS) for at in range(resident, blocks))
        reached = min(resident, blocks - 1)  # the last block is always computed
        return ScheduledRequest(
            prompt_tokens=blocks * BLOCK_TOKENS,
            resident_tokens=reached * BLOCK_TOKENS,
            path=list(ids),
            resumable=list(ids[:reached])[::-1],
            admitted=[ids[depth - 1] for depth in admitted_blocks(blocks, "dense", _CHUNK_BLOCKS)],
            dropped=dropped,
        )

    def sample(self) -> dict[str, float]:
        """Return the metrics, from any thread."""
        found: dict[str, float] = {
            MetricKey.DRY_RUN_REQUESTS.value: self._requests,
            MetricKey.DRY_RUN_REJECTED_REQUESTS.value: self._rejected,
            MetricKey.DRY_RUN_PROMPT_TOKENS.value: self._prompt_tokens,
            MetricKey.DRY_RUN_HIT_TOKENS.of("engine"): self._engine_tokens,
        }
        for policy, simulator in self._simulators.items():
            hit = self._hit_tokens[policy]
            missed = self._resident_tokens - hit
            found[MetricKey.DRY_RUN_HIT_TOKENS.of(policy)] = hit
            found[MetricKey.DRY_RUN_MISSED_BY_STATE_TOKENS.of(policy)] = missed
            found[MetricKey.DRY_RUN_EVICTIONS.of(policy)] = simulator.evicted_states
        return found


def begin(
    slots: int,
    kv_tokens: int,
    settings: Settings,
    log: logging.Logger,
    report: Callable[[], object] = lambda: None,
) -> tuple[ShadowReplay, Observer]:
    """Return a replay, and what feeds it from a recorder's thread; `report` is called after that.

    Whatever goes wrong there is logged once and ends the dry run, nothing else.
    """
    shadow = ShadowReplay(slots, kv_tokens, settings.cost_model())
    log.info(
        "statecache: dry run: the engine is left as it is%s; replayed with %d states and %d tokens"
        " of KV under %s",
        f" ({', '.join(settings.left_out)} not put in place)" if settings.left_out else "",
        slots,
        kv_tokens,
        ", ".join(policy_names(ENGINE)),
    )

    def observe(seen: list[tuple[list[int], int]]) -> None:
        for ids, cached_tokens in seen:
            shadow.observe(ids, cached_tokens)
        if seen:
            report()

    return shadow, BestEffort(observe)
