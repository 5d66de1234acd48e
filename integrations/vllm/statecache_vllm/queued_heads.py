"""Requests of vLLM's queue that wait for the state of a head which another one is computing.

A request that is told "not now" in a lookup stays in the queue without holding up those behind it;
it is asked about again in each step. The state it waits for is one that vLLM itself keeps: where
prompts part, a request gets what vLLM calls its shared-prefix boundary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from statecache import CostModel
from statecache.engine.metrics import EventCounters
from statecache.engine.shared_heads import Prompt, SharedHeads
from statecache_vllm import seams
from statecache_vllm.views import Request

__all__ = ["QueuedHeads"]


class _HashedTokens:
    """The tokens of a request, compared by the hashes of its blocks.

    A hash stands for all tokens up to its end, with salt, adapter and images in it: a slice is the
    last one that ends in it. Two prompts seem to share the block in which they part, but its end.
    A hash that covers tokens behind its block (vLLM 0.33, for a drafter) is there once they are.

    Where vLLM gives up the last `dropped` tokens of a hit, they are shared only if those behind
    them are, too.
    """

    def __init__(self, request: Request, tokens_per_hash: int, dropped: int) -> None:
        self._hashes = request.block_hashes
        hashed = (len(self._hashes) + 1) * tokens_per_hash
        self._tokens = min(request.num_tokens, hashed - 1)
        self._per_hash = tokens_per_hash
        self._dropped = dropped

    def __len__(self) -> int:
        return max(self._tokens - self._dropped, 0)

    def __getitem__(self, tokens: slice) -> bytes:
        last = min(tokens.stop + self._dropped, self._tokens) // self._per_hash
        return self._hashes[last - 1] if last > tokens.start // self._per_hash else b""


class _Cut(NamedTuple):
    """Where a prefill has to end for others, and the boundary vLLM had found for the request."""

    depth: int
    vllms: int


class QueuedHeads:
    """Who waits in the queue of one scheduler, and where the prefill of others ends for them.

    Requests resume at multiples of `grid` tokens; each hash of vLLM adds `hash_tokens` to the one
    before it; states are kept every `interval` tokens, 0 for at no fixed distance. `drops_block`
    says that vLLM computes the last block of a hit, or what a hash adds, again for a drafter.
    `counts` gets the numbers of waits.
    """

    def __init__(
        self,
        cost: CostModel,
        grid: int,
        hash_tokens: int,
        interval: int,
        counts: EventCounters,
        *,
        drops_block: bool = False,
    ) -> None:
        self._heads = SharedHeads(cost, counts)
        self._dropped = hash_tokens if drops_block else 0
        self._grid, self._hash_tokens, self._interval = grid, hash_tokens, interval
        self._prompts: WeakKeyDictionary[Request, Prompt] = WeakKeyDictionary()
        self._cuts: dict[str, _Cut] = {}
        self._hits: dict[str, int] = {}  # of those that wait, when they were looked up
        self._in_step: dict[str, Request] = {}

    @property
    def known(self) -> set[str]:
        """The names of all requests something is held of."""
        return {*self._cuts, *self._hits, *self._in_step}

    def _prompt(self, request: Request) -> Prompt:
        prompt = self._prompts.get(request)
        if prompt is None:
            tokens: Any = _HashedTokens(request, self._hash_tokens, self._dropped)
            prompt = self._prompts[request] = Prompt(tokens, None)
        return prompt

    def must_wait(self, request: Request, hit: int) -> bool:
        """Whether a request of the queue, found in the cache for `hit` tokens, waits."""
        waits = self._heads.should_wait(request, self._prompt(request), hit, seams.is_running)
        if waits:
            self._hits[request.request_id] = hit
        else:
            self._hits.pop(request.request_id, None)
        return waits

    def still_waits(self, request: Request) -> bool:
        """Whether a request goes on waiting; it need not be looked up then."""
        hit = self._hits.get(request.request_id)
        return hit is not None and self.must_wait(request, hit)

    def admitted(self, request: Request, hit: int) -> None:
        """A request of the queue got its blocks, and begins at `hit`."""
        self._heads.admitted(request, hit)

    def begin_chunk(self, request: Request, start: int, queued: Iterable[Request]) -> None:
        """Have vLLM end the prefill of `request`, and keep a state, where the most others part."""
        name = request.request_id
        if not seams.is_running(request):
            self._heads.gone(request)  # it begins, or begins again: nobody waits for what it lost
        cut = self._cuts.get(name)
        own = request.shared_prefix_boundary
        if cut is not None and own == cut.depth:
            own = cut.vllms
        depth = self._heads.cut(
            request,
            self._prompt(request),
            start,
            request.num_prompt_tokens,
            ((other, self._prompt(other)) for other in queued if other is not request),
            self._grid,
        )
        if depth is not None and not start < own < depth:
            self._cuts[name] = _Cut(depth, own)
            request.shared_prefix_boundary = depth
        elif cut is not None and start >= cut.depth:
            request.shared_prefix_boundary = own

    def without_extra_step(self, request: Request, start: int, asked: int, tokens: int) -> int:
        """Return how many tokens to compute: a chunk that ended for others is no step more.

        vLLM ends the last chunk but one at the last full block. A prompt that ended a chunk for
        others goes past that: its own end is worth less than the step.
        """
        cut = self._cuts.get(request.request_id)
        last = self._last_full_block(request)
        if (
            cut is None
            or not cut.depth <= start < last == start + tokens
            or request.shared_prefix_boundary == last
            or start + asked < request.num_prompt_tokens
        ):
            return tokens
        return asked

    def _last_full_block(self, request: Request) -> int:
        """Return where vLLM keeps the state of the end of a prompt."""
        if self._dropped:
            return (request.num_prompt_tokens // self._grid - 1) * self._grid
        return (request.num_prompt_tokens - 1) // self._grid * self._grid

    def computing(self, request: Request, start: int) -> None:
        """A chunk of `request` is to begin at `start`."""
        self._in_step[request.request_id] = request
        states = sorted({depth for depth in self._states_of(request, start) if depth > start})
        self._heads.computing(request, self._prompt(request), start, states)

    def _states_of(self, request: Request, start: int) -> Iterator[int]:
        """Yield where `request` will leave states from `start` on."""
        every = self._interval
        yield request.shared_prefix_boundary // self._grid * self._grid
        if every:
            yield from range((start // every + 1) * every, request.num_prompt_tokens + 1, every)
        cut, last = self._cuts.get(request.request_id), self._last_full_block(request)
        if cut is None or cut.depth >= last:
            yield last

    def stepped(self, scheduled: Mapping[str, int]) -> None:
        """A step is planned; `scheduled` tokens of its requests will be there in the next one."""
        for name, request in self._in_step.items():
            if name in scheduled:
                self._heads.computed(request, request.num_computed_tokens + scheduled[name])
        self._in_step.clear()

    def finished(self, request: Request) -> None:
        """A request ended, for whatever reason."""
        self._heads.gone(request)
        self._cuts.pop(request.request_id, None)
        self._hits.pop(request.request_id, None)
        self._in_step.pop(request.request_id, None)
