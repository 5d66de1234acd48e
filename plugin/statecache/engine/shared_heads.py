"""A head that several queued prompts share is computed once: who waits for whom.

A prompt that is being computed leaves states on its way. A queued prompt that has the tokens before
such a state in common with it can wait for the state instead of computing them again. It does so

- while the other request runs, so something always goes on;
- if the other is no further from the state than it would be itself, by the cost model, and having
  the state saves more than the step that the wait may cost;
- once: whatever comes of that, it then goes on.

For the state to lie where the prompts part, a step has to end there: `cut` says where.

Decisions are a pure function of the calls. Depths are tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from statecache.engine.metrics import EventCounters, MetricKey

if TYPE_CHECKING:
    from statecache import CostModel

__all__ = ["LEAST_TOKENS", "MOST_QUEUED", "Prompt", "SharedHeads", "common_tokens"]

LEAST_TOKENS = 512  # a step of its own costs about as much as computing so many
MOST_QUEUED = 128  # requests of the queue that are looked at for a cut
_FIRST_LOOK = 64


class Prompt(NamedTuple):
    """The tokens of a request, and what keeps its prefixes apart from those of others."""

    tokens: Sequence[int]
    namespace: Hashable


def common_tokens(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many tokens two prompts have in common. O(that); slices must be comparable."""
    most = min(len(a), len(b))
    low, step = 0, _FIRST_LOOK
    while low < most and a[low : low + step] == b[low : low + step]:
        low, step = low + step, 2 * step
    if low >= most:
        return most
    high = min(low + step, most)  # the first difference lies below, or the shorter one ends there
    if a[low:high] == b[low:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


class _Wait:
    """That a queued request waits, or has waited: for what, and from where it could have begun."""

    def __init__(self, work: _Work, hit: int) -> None:
        self.work: _Work | None = work
        self.hit = hit
        self.admitted = False


class _Work:
    """What one request is computing: from where, and where it will leave states."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.at = 0
        self.states: tuple[int, ...] = ()
        self._common: WeakKeyDictionary[object, int] = WeakKeyDictionary()

    def shared_with(self, request: object, prompt: Prompt) -> int:
        """Return after how many tokens `request` could resume at most, if the states were there."""
        if prompt.namespace != self.prompt.namespace:
            return 0
        found = self._common.get(request)
        if found is None:
            found = common_tokens(self.prompt.tokens, prompt.tokens)
            self._common[request] = found
        return min(found, len(prompt.tokens) - 1)  # the last token is always computed


class SharedHeads:
    """The requests that are being computed, and who waits for one of their states.

    Requests are objects of the engine, told apart by identity, that can be referred to weakly.
    `counts` gets the numbers of waits.
    """

    def __init__(
        self, cost: CostModel, counts: EventCounters | None = None, least: int = LEAST_TOKENS
    ) -> None:
        self._cost = cost.cost
        self._counts = EventCounters() if counts is None else counts
        self._least = least
        self._work: WeakKeyDictionary[object, _Work] = WeakKeyDictionary()
        self._waits: WeakKeyDictionary[object, _Wait] = WeakKeyDictionary()

    # What a request that runs does.

    def computing(self, request: object, prompt: Prompt, at: int, states: Iterable[int]) -> None:
        """A step computes `prompt` from `at`; a state is cached at each of `states`, ascending."""
        work = self._work_of(request, prompt)
        work.at, work.states = at, tuple(depth for depth in states if depth > at)

    def computed(self, request: object, to: int) -> None:
        """The step is through: what is cached up to `to` can be found, what is not will not be."""
        work = self._work.get(request)
        if work is None:
            return
        work.at = max(work.at, to)
        work.states = tuple(depth for depth in work.states if depth > to)
        if to >= len(work.prompt.tokens):
            self.gone(request)

    def gone(self, request: object) -> None:
        """The request ended, was aborted, or gave up what it had computed."""
        work = self._work.pop(request, None)
        if work is not None:
            work.states = ()

    def cut(
        self,
        request: object,
        prompt: Prompt,
        at: int,
        limit: int,
        queued: Iterable[tuple[object, Prompt]],
        grid: int = 1,
    ) -> int | None:
        """Return where a step of `request` from `at` to `limit` should rather end, or have a state.

        That is where `queued` prompts part from it: of several such depths, all multiples of
        `grid`, the one that saves most. None where it would save too little.
        """
        work = self._work_of(request, prompt)
        depths: list[int] = []
        for other, its_prompt in islice(queued, MOST_QUEUED):
            wait = self._waits.get(other)
            if other is request or (wait is not None and wait.work is None):
                continue
            depth = work.shared_with(other, its_prompt) // grid * grid
            if self._is_worth(at, depth) and depth < limit:
                depths.append(depth)
        best, most = None, 0.0
        for above, depth in enumerate(sorted(depths)):
            saved = (len(depths) - above) * self._cost(at, depth)
            if saved > most:
                best, most = depth, saved
        return best

    def _work_of(self, request: object, prompt: Prompt) -> _Work:
        work = self._work.get(request)
        if work is None or work.prompt.tokens is not prompt.tokens:
            work = self._work[request] = _Work(prompt)
        return work

    def _is_worth(self, begin: int, end: int) -> bool:
        return end > begin and self._cost(begin, end) >= self._cost(0, self._least)

    # What a queued one does.

    def should_wait(
        self, request: object, prompt: Prompt, hit: int, is_running: Callable[[object], bool]
    ) -> bool:
        """Whether a queued request, that could begin at `hit` now, is to be left in the queue.

        `is_running` says of a request whether it goes on by itself.
        """
        wait = self._waits.get(request)
        if wait is not None and wait.work is None:
            return False
        for other, work in list(self._work.items()):
            if other is request or (wait is not None and work is not wait.work):
                continue
            if self._state_to_wait_for(work, request, prompt, hit) and is_running(other):
                if wait is None:
                    self._waits[request] = _Wait(work, hit)
                    self._counts.add(MetricKey.HEAD_WAITS.value)
                self._counts.add(MetricKey.HEAD_WAIT_STEPS.value)
                return True
        if wait is not None:
            wait.work = None
        return False

    def admitted(self, request: object, hit: int) -> None:
        """A queued request begins at `hit`: what it waited for, if it did, is known now."""
        wait = self._waits.get(request)
        if wait is None or wait.admitted:
            return
        wait.work, wait.admitted = None, True
        if hit > wait.hit:
            self._counts.add(MetricKey.HEAD_WAIT_SAVED_TOKENS.value, hit - wait.hit)

    def _state_to_wait_for(self, work: _Work, request: object, prompt: Prompt, hit: int) -> int:
        if not work.states or work.states[-1] <= hit:
            return 0
        shared = work.shared_with(request, prompt)
        depth = max((depth for depth in work.states if depth <= shared), default=0)
        if not self._is_worth(hit, depth) or self._cost(work.at, depth) > self._cost(hit, depth):
            return 0
        return depth
