"""What the plugin has in the scheduler's process for one cache: its states, and the barrier.

Advice must never take a server down: an unexpected error is counted, logged once, and ends the
plugin's part. From then on `faults.active` is False and the engine's own walk decides.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from statecache.engine.faults import FaultBarrier, advisory
from statecache.engine.metrics import EventCounters, Reporter
from statecache.engine.settings import Settings
from statecache.index.keyed_index import PrefixKey, TokenPrefixes
from statecache_sglang.head_waits import HeadWaits
from statecache_sglang.seams import scheduler as scheduler_seams
from statecache_sglang.seams import slots as state_slots
from statecache_sglang.state_registry import StateRegistry
from statecache_sglang.views import (
    InsertParameters,
    PrefillAdder,
    RadixKey,
    Request,
    TreeCache,
)

__all__ = [
    "BackupLocks",
    "SchedulerSide",
    "is_prompt_end",
    "is_spare_insert",
    "prefix_of",
    "scheduler_side_of",
]

_log = logging.getLogger("statecache.sglang")


class SchedulerSide:
    """The registry of one tree, and the barrier behind which it is called.

    `depth_of` says how many tokens end at a node, `is_locked` whether a request holds its state.
    """

    def __init__(
        self,
        settings: Settings,
        find_below: Callable[[int, list[int]], list[int]],
        depth_of: Callable[[int], int],
        is_locked: Callable[[int], bool],
        slots: int,
    ) -> None:
        self.is_locked = is_locked
        self._depth_of = depth_of
        self.registry = StateRegistry(settings, find_below, slots)
        self._waits = HeadWaits(settings, self.registry.counts)
        self.faults = FaultBarrier(_log, "SGLang's own order takes over", "the state index failed")
        self.reporter: Reporter | None = None

    @property
    def counts(self) -> EventCounters:
        """What happened since the start, over every tree there was."""
        return self.registry.counts

    def reset(self) -> None:
        """Start over with an empty tree."""
        self.registry.reset()
        self.faults.active = True

    @advisory
    def admitted(self, cache: TreeCache, req: Request) -> None:
        """A request is going to be prefilled: tell a policy that needs prompts."""
        self.registry.resumed(req.last_node)
        self._waits.admitted(req)
        if not self.registry.needs_prompts:
            return
        tokens = req.full_untruncated_fill_ids
        end = state_slots.last_state_depth(cache, len(tokens))
        namespace = scheduler_seams.namespace_of(req)
        self.registry.on_prompt(tokens, namespace, req.last_node, [end] if end else [])

    @advisory
    def on_prompt(
        self, tokens: Sequence[int], namespace: bytes, hit: int, offered: Sequence[int]
    ) -> None:
        """A prompt was admitted: as `StateRegistry.on_prompt`, for a driver of its own."""
        self.registry.on_prompt(tokens, namespace, hit, offered)

    @advisory
    def has_spare(self) -> bool:
        """Whether a spare state can go for another one."""
        return self.registry.has_spare(self.is_locked)

    @advisory
    def condemn_all(self, must_go: Callable[[int], bool]) -> None:
        """The states of which `must_go` holds go before all others."""
        for state in filter(must_go, self.registry.states()):
            self.registry.condemn(state)

    @advisory
    def has_condemned(self) -> bool:
        """Whether a state that must go can go now."""
        return self.registry.has_condemned(self.is_locked)

    @advisory
    def deepest_above(self, state: int, is_good: Callable[[int], bool]) -> tuple[int, int] | None:
        """Return the deepest state above this one of which `is_good` holds, and its depth."""
        above = next(filter(is_good, self.registry.above(state)), None)
        return None if above is None else (above, self._depth_of(above))

    # Shared heads: as `HeadWaits`.

    @advisory
    def note_queue(self, queue: Sequence[Request]) -> None:
        """The queue was sorted."""
        self._waits.note_queue(queue)

    @advisory
    def cut(self, req: Request, at: int, limit: int, grid: int) -> int | None:
        """Return where queued requests part from `req`."""
        return self._waits.cut(req, at, limit, grid)

    @advisory
    def computing(self, req: Request, begin: int, end: int | None) -> None:
        """The next step computes `req` from `begin`, and leaves a state at `end`."""
        self._waits.computing(req, begin, end)

    @advisory
    def computed(self, req: Request, tokens: int) -> None:
        """The state of `req` after so many tokens is cached, or will not be."""
        self._waits.computed(req, tokens)

    @advisory
    def should_wait(self, adder: PrefillAdder, req: Request) -> bool:
        """Whether a queued request waits for the state of another one."""
        return self._waits.should_wait(adder, req)

    @advisory
    def comes_next(self, req: Request) -> bool:
        """Whether a queued request is passed over, as it could not be cut in this step."""
        return self._waits.comes_next(req)

    def note_insert(self, state: int, params: InsertParameters | None, depth: int) -> None:
        """An insert puts the state of this node next, at `depth`; without one nothing is known."""
        if params is None or not self.registry.needs_prompts:
            return
        named = getattr(params, "statecache_prefix", None)
        if named is None or named.depth != depth:
            key: RadixKey = params.key
            space = getattr(params, "statecache_namespace", None)
            if space is None:
                space = scheduler_seams.namespace(key.extra_key, key.cache_salt)
            named = TokenPrefixes.prefix_key(key.token_ids, depth, space)
        self.registry.set_prefix(state, named, end=is_prompt_end(params))


def is_spare_insert(params: InsertParameters | None) -> bool:
    """Whether an insert caches a state that is the first to go."""
    return getattr(params, "statecache_spare", False)


def scheduler_side_of(cache: TreeCache) -> SchedulerSide | None:
    """Return what manages the states of `cache`; None where SGLang does so alone."""
    return getattr(getattr(cache, "tree_core", None), "scheduler_side", None)


def prefix_of(req: Request, depth: int) -> PrefixKey:
    """Return the key of the first `depth` tokens of a request; the last one is kept with it."""
    known: PrefixKey | None = getattr(req, "statecache_prefix", None)
    if known is None or known.depth != depth:
        space = scheduler_seams.namespace_of(req)
        known = TokenPrefixes.prefix_key(req.full_untruncated_fill_ids, depth, space)
        req.statecache_prefix = known
    return known


def is_prompt_end(params: InsertParameters) -> bool:
    """Whether an insert caches the end of a prompt, or of a request, and not of a chunk."""
    return getattr(params, "statecache_end", True)


class BackupLocks:
    """Nodes that a write-through to the host keeps locked.

    SGLang locks them as a request does, but a copy that was made is no use of the state.
    """

    def __init__(self) -> None:
        self._running: set[int] = set()
        self._made: int | None = None

    def begin(self, node: int) -> None:
        """A write-through locked this node."""
        self._running.add(node)

    def end(self, node: int) -> None:
        """The write-through of this node is through: the next release of it is its own."""
        if node in self._running:
            self._running.discard(node)
            self._made = node

    def is_last_request(self, node: int, locks: int) -> bool:
        """Whether a release that left so many locks was the last request's."""
        if node == self._made:
            self._made = None
            return False
        return locks == (node in self._running)
