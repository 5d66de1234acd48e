"""The states of one tree under `learned`, which is told of requests and knows states by prefix."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

from statecache.engine.settings import Settings
from statecache.index.keyed_index import GHOSTS, PrefixKeyedIndex, TokenPrefixes
from statecache.index.policies import find_policy
from statecache_sglang import pool_seams
from statecache_sglang.scheduler_side import StateBook

__all__ = ["LearnedBook", "admitted", "is_end", "new_book", "space_of"]


def space_of(extra_key: str | None, cache_salt: str | None) -> bytes:
    """Return what keeps the prefixes of one namespace apart from those of another."""
    if not extra_key and not cache_salt:
        return b""
    return blake2b(repr((extra_key or "", cache_salt or "")).encode(), digest_size=16).digest()


def is_end(insert_params: Any) -> bool:
    """Whether an insert caches the end of a prompt, or of a request, and not of a chunk."""
    return getattr(insert_params, "statecache_end", True)


def admitted(cache: Any, req: Any) -> None:
    """A request is going to be prefilled: say so to the book of a cache that learns."""
    advisor = getattr(cache.tree_core, "advisor", None)
    if advisor is not None and isinstance(advisor.book, LearnedBook):
        advisor.ask(_requested, advisor.book, cache, req)


def _requested(book: LearnedBook, cache: Any, req: Any) -> None:
    tokens = req.full_untruncated_fill_ids
    end = pool_seams.last_state(cache, len(tokens))
    space = space_of(req.extra_key, req.cache_salt)
    book.requested(tokens, space, req.last_node, [end] if end else [])


def new_book(
    settings: Settings, below: Callable[[int, list[int]], list[int]], slots: int
) -> StateBook:
    """Return the book of the policy; `slots` is how many states there can be."""
    if find_policy(settings.policy).needs_prompts:
        return LearnedBook(settings, below, slots)
    return StateBook(settings, below)


class LearnedBook(StateBook):
    """A match is no use here: a scheduler matches a waiting request again and again.

    What counts is that a request was admitted (`requested`), once. The end of a request is none
    either; it stamps.
    """

    def __init__(
        self, settings: Settings, below: Callable[[int, list[int]], list[int]], slots: int
    ) -> None:
        self._named = PrefixKeyedIndex(settings.policy, settings.cost_model(), slots)
        super().__init__(settings, below, self._named)
        self._prefixes = TokenPrefixes(4 * (GHOSTS + slots))

    def name(self, state: int, key: Any, depth: int, *, end: bool) -> None:
        """A state is put next: it ends the first `depth` tokens of `key`, maybe a prompt."""
        space = space_of(key.extra_key, key.cache_salt)
        self._named.name(state, self._prefixes.note(key.token_ids, depth, space), end=end)

    def requested(
        self, tokens: Sequence[int], space: bytes, hit: int, offered: Sequence[int]
    ) -> None:
        """A request was admitted that resumes at the node `hit`, if that holds a state.

        States will be offered after the first `offered` tokens, if they lie beyond its hit.
        """
        keys, depths, admitted = self._prefixes.path(tokens, space, offered)
        # The last token of a prompt is always computed.
        resumable = bisect_right(depths, len(tokens) - 1)
        self._named.on_prompt(keys, depths, resumable, admitted)
        if hit in self:
            self._named.touch(hit)

    def use(self, state: int) -> bool:
        """A match ended at this node; return whether it holds a state."""
        return state in self

    def released(self, state: int) -> None:
        """The last request holding this node let go."""
        if state in self:
            self._named.stamp(state)

    def node_gone(self, state: int) -> None:
        """SGLang removed a node for want of KV, whose state, if it had one, is gone already."""
        if not self.walking:
            self._named.lost(state)

    def sample(self) -> dict[str, float]:
        """Return the numbers for the metrics."""
        return {**self._named.sample(), "learned_prefixes": len(self._prefixes)}
