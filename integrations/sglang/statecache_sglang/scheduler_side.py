"""What the plugin has in the scheduler's process for one cache: its states, and the barrier.

Advice must never take a server down: an unexpected error is counted, logged once, and ends the
plugin's part. From then on `faults.active` is False and the engine's own walk decides.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from hashlib import blake2b

from statecache.engine.faults import FaultBarrier, advisory
from statecache.engine.metrics import EventCounters, Reporter
from statecache.engine.settings import Settings
from statecache_sglang.seams import slots as state_slots
from statecache_sglang.state_registry import StateRegistry
from statecache_sglang.views import (
    InsertParameters,
    RadixKey,
    Request,
    TreeCache,
)

__all__ = ["BackupLocks", "SchedulerSide", "is_prompt_end", "namespace_of", "scheduler_side_of"]

_log = logging.getLogger("statecache.sglang")


class SchedulerSide:
    """The registry of one tree, and the barrier behind which it is called.

    `is_locked` says whether a request holds the state of a node.
    """

    def __init__(
        self,
        settings: Settings,
        find_below: Callable[[int, list[int]], list[int]],
        is_locked: Callable[[int], bool],
        slots: int,
    ) -> None:
        self.is_locked = is_locked
        self.registry = StateRegistry(settings, find_below, slots)
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
        if not self.registry.needs_prompts:
            return
        tokens = req.full_untruncated_fill_ids
        end = state_slots.last_state_depth(cache, len(tokens))
        namespace = namespace_of(req.extra_key, req.cache_salt)
        self.registry.on_prompt(tokens, namespace, req.last_node, [end] if end else [])

    @advisory
    def on_prompt(
        self, tokens: Sequence[int], namespace: bytes, hit: int, offered: Sequence[int]
    ) -> None:
        """A prompt was admitted: as `StateRegistry.on_prompt`, for a driver of its own."""
        self.registry.on_prompt(tokens, namespace, hit, offered)

    def note_insert(self, state: int, params: InsertParameters | None, depth: int) -> None:
        """An insert puts the state of this node next, at `depth`; without one nothing is known."""
        if params is None or not self.registry.needs_prompts:
            return
        key: RadixKey = params.key
        self.registry.set_prefix(
            state,
            key.token_ids,
            depth,
            namespace_of(key.extra_key, key.cache_salt),
            end=is_prompt_end(params),
        )


def scheduler_side_of(cache: TreeCache) -> SchedulerSide | None:
    """Return what manages the states of `cache`; None where SGLang does so alone."""
    return getattr(cache.tree_core, "scheduler_side", None)


def namespace_of(extra_key: str | None, cache_salt: str | None) -> bytes:
    """Return what keeps the prefixes of one namespace apart from those of another."""
    if not extra_key and not cache_salt:
        return b""
    return blake2b(repr((extra_key or "", cache_salt or "")).encode(), digest_size=16).digest()


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
