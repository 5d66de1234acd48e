"""What a server was asked and what came of it, request by request, and one row a run."""

from __future__ import annotations

import itertools
import statistics
from typing import TYPE_CHECKING

import msgspec

from statecache.ab.results import Counters, Run, Times

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from statecache.ab.server_arm import ServerArm

__all__ = ["Answered", "Answers"]


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """One request; times are in seconds, `asked_at` and `ended_at` from the start of the run.

    `pieces` is when tokens came, counted from when they were asked for, and how many together.
    `cached_tokens` is what the server said, None where it does not. `answered_tokens` of the prompt
    are what the server had answered before in this session; `output_ids` are the tokens of this
    answer, None where the server does not tell them. One with an `error` has what came before.
    """

    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    asked_at: float
    ended_at: float
    pieces: list[tuple[float, int]]
    error: str | None = None
    answered_tokens: int = 0
    output_ids: list[int] | None = None

    @property
    def hit_tokens(self) -> int:
        """The tokens of the prompt that were reused; some servers leave a zero out."""
        return min(self.cached_tokens or 0, self.prompt_tokens)

    @property
    def first_after(self) -> float:
        """Seconds to the first token; there must be one."""
        return self.pieces[0][0]

    @property
    def gaps(self) -> list[float]:
        """Seconds from each token to the next; tokens that came together share theirs."""
        return [
            (after - before) / tokens
            for (before, _), (after, tokens) in itertools.pairwise(self.pieces)
            for _ in range(tokens)
        ]


class Answers(msgspec.Struct, frozen=True):
    """A workload played to its end, in the order of the workload.

    With what the server counted meanwhile, and the most memory that it took, if it was launched.
    """

    answered: list[Answered]
    counters: Counters | None = None
    peak_resident_bytes: int | None = None

    def __len__(self) -> int:
        """How many requests were asked, the warm-up included."""
        return len(self.answered)

    def rows(self) -> Iterator[dict[str, object]]:
        """Yield what there is to say of each request."""
        for request in self.answered:
            yield {
                "prompt_tokens": request.prompt_tokens,
                "answered_tokens": request.answered_tokens,
                "cached_tokens": request.cached_tokens,
                "output_tokens": request.output_tokens,
                "asked_at_seconds": round(request.asked_at, 6),
                "ended_at_seconds": round(request.ended_at, 6),
                "ttft_ms": round(1000 * request.first_after, 3) if request.pieces else None,
                "itl_ms": [round(1000 * gap, 3) for gap in request.gaps],
                "error": request.error,
            }

    def total(self, cell: str, arm: ServerArm, seed: int | None, warm_up: int) -> Run:
        """Add up all but the first `warm_up` requests."""
        counted = self.answered[warm_up:]
        done = [request for request in counted if request.error is None]
        reported = any(request.cached_tokens is not None for request in done)
        counters = self.counters or Counters(source="")
        return Run(
            cell=cell,
            arm=arm.name,
            seed=seed,
            warm_up=warm_up,
            requests=len(done),
            rejected=len(counted) - len(done),
            prompt_tokens=sum(request.prompt_tokens for request in done),
            hit_tokens=sum(request.hit_tokens for request in done) if reported else None,
            overstated_hit_tokens=sum(
                (request.cached_tokens or 0) - request.hit_tokens for request in done
            ),
            resident_tokens=None,
            missed_by_state_tokens=None,
            recompute_cost=None,
            evicted_states=counters.evicted_states,
            skipped_states=counters.skipped_states,
            answered_tokens=sum(request.answered_tokens for request in done),
            peak_resident_bytes=self.peak_resident_bytes,
            counters=self.counters,
            times=_times(done, len(counted)) if counted else None,
        )


def _times(done: Sequence[Answered], asked: int) -> Times:
    first = _quantiles([request.first_after for request in done]) if done else None
    gaps = [gap for request in done for gap in request.gaps]
    between = _quantiles(gaps) if gaps else None
    return Times(
        ttft_p50_ms=first[50] if first else None,
        ttft_p90_ms=first[90] if first else None,
        ttft_p99_ms=first[99] if first else None,
        itl_p50_ms=between[50] if between else None,
        itl_p99_ms=between[99] if between else None,
        output_tokens_per_second=_speed(done),
        request_errors=(asked - len(done)) / asked,
        ttft_quantiles_ms=first or [],
    )


def _speed(done: Sequence[Answered]) -> float:
    if not done:
        return 0.0
    started = min(request.asked_at for request in done)
    seconds = max(request.ended_at for request in done) - started
    return sum(request.output_tokens for request in done) / max(seconds, 1e-9)


def _quantiles(seconds: Sequence[float]) -> list[float]:
    """Return the quantiles at 0, 1, ... 100 %, in milliseconds; between two values on a line."""
    if len(seconds) == 1:
        return [1000 * seconds[0]] * 101
    inner = statistics.quantiles(seconds, n=100, method="inclusive")
    return [1000 * value for value in (min(seconds), *inner, max(seconds))]
