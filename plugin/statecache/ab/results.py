"""What a driver measures: one row a request, added up to one a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from statecache.trace.format import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from statecache.ab.arms import Arm

__all__ = ["MEASURES", "Counters", "Measure", "Played", "Run", "Served", "Times"]


class Served(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One request, in tokens of whole blocks. A rejected one found no room and counts nowhere."""

    prompt_tokens: int
    resident_tokens: int
    hit_tokens: int
    rejected: bool = False

    @classmethod
    def of_blocks(cls, prompt: int, resident: int, hit: int) -> Served:
        """Make one of numbers of blocks."""
        return cls(prompt * BLOCK_TOKENS, resident * BLOCK_TOKENS, hit * BLOCK_TOKENS)


class Played(msgspec.Struct, frozen=True):
    """A workload played to its end; skipped states found no slot and were not kept.

    None where the engine does not count them.
    """

    served: list[Served]
    evicted_states: int | None
    skipped_states: int | None

    def __len__(self) -> int:
        """How many requests were played, the warm-up included."""
        return len(self.served)

    def rows(self) -> Iterator[dict[str, object]]:
        """Yield what there is to say of each request."""
        for request in self.served:
            yield {
                "prompt_tokens": request.prompt_tokens,
                "resident_tokens": request.resident_tokens,
                "hit_tokens": request.hit_tokens,
                "rejected": request.rejected,
            }

    def total(self, cell: str, arm: Arm, seed: int | None, warm_up: int) -> Run:
        """Add up all but the first `warm_up` requests."""
        counted: Sequence[Served] = self.served[warm_up:]
        done = [request for request in counted if not request.rejected]
        hit = sum(request.hit_tokens for request in done)
        resident = sum(request.resident_tokens for request in done)
        cost = arm.cost_model()
        return Run(
            cell=cell,
            arm=arm.name,
            seed=seed,
            warm_up=min(warm_up, len(self.served)),
            requests=len(done),
            rejected=len(counted) - len(done),
            prompt_tokens=sum(request.prompt_tokens for request in done),
            hit_tokens=hit,
            resident_tokens=resident,
            missed_by_state_tokens=resident - hit,
            recompute_cost=sum(
                cost.cost(request.hit_tokens, request.prompt_tokens) for request in done
            ),
            evicted_states=self.evicted_states,
            skipped_states=self.skipped_states,
            state_slot_bytes=arm.state_slot_bytes,
        )


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """What a server took, in milliseconds, without the warm-up.

    TTFT is the time to the first token, from `ttft_quantiles_ms` at 0, 1, ... 100 %; ITL the time
    from one token to the next, None where all of an answer came at once. `request_errors` is
    the share of requests that failed; they count nowhere else. Where all failed there is no TTFT.
    """

    ttft_p50_ms: float | None
    ttft_p90_ms: float | None
    ttft_p99_ms: float | None
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    output_tokens_per_second: float
    request_errors: float
    ttft_quantiles_ms: list[float]


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """What a server counted in a run, its warm-up included.

    `source` is the plugin ("statecache") or the engine that counted. None is what it does not
    count. A request that was preempted counts again in the plugin's `requests`. `kv_pool_bytes`
    is the size of the pool of KV alone, where the engine tells it. Hits are prompt tokens at most;
    what was counted beyond that is in `overstated_hit_tokens` alone.
    """

    source: str
    requests: int | None = None
    prompt_tokens: int | None = None
    hit_tokens: int | None = None
    missed_by_state_tokens: int | None = None
    evicted_states: int | None = None
    skipped_states: int | None = None
    kv_pool_bytes: int | None = None
    overstated_hit_tokens: int = 0


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of one arm at one seed. Requests of the warm-up count in `warm_up` alone.

    Evicted and skipped states count from the start: they belong to no one request. None is what
    was not measured: a server does not say what was resident, and its hits only where it reports
    them; `times` are those of servers, `counters` what their `/metrics` say. `rejected` are a
    server's errors; `answered_tokens` of its prompts are what it had answered itself.
    `peak_resident_bytes` is the memory of a launched server's processes, `state_slot_bytes` that of
    the arm's state slots, where it says what a state takes. No request hits more than its prompt:
    what a server said beyond that is in `overstated_hit_tokens` alone.
    """

    cell: str
    arm: str
    seed: int | None
    warm_up: int
    requests: int
    rejected: int
    prompt_tokens: int
    hit_tokens: int | None
    resident_tokens: int | None
    missed_by_state_tokens: int | None
    recompute_cost: float | None
    evicted_states: int | None
    skipped_states: int | None
    times: Times | None = None
    answered_tokens: int | None = None
    peak_resident_bytes: int | None = None
    state_slot_bytes: int | None = None
    counters: Counters | None = None
    overstated_hit_tokens: int = 0


class Measure(msgspec.Struct, frozen=True):
    """A number that arms are compared by.

    Hit rate and missed-by-state tokens of a server that does not report them request by request are
    those of its counters, with the warm-up in them: `counted` says so.
    """

    name: str
    higher_is_better: bool

    @property
    def family(self) -> str:
        """The measures that are corrected together: those of servers are one family."""
        return self.name if self.name in _TOTALS else "server"

    def of(self, run: Run) -> float | None:
        """Return the measure of a run; 0 where no request was served, None if not measured."""
        if self.name == "peak_resident_mib":
            return None if run.peak_resident_bytes is None else run.peak_resident_bytes / 2**20
        if self.name not in _TOTALS:
            found: float | None = None if run.times is None else getattr(run.times, self.name)
            return found
        source = run.counters if self.counted(run) and run.counters else run
        total: float | None = getattr(source, _TOTALS[self.name])
        whole = source.prompt_tokens if self.name == "token_hit_rate" else source.requests
        return None if total is None or whole is None else total / whole if whole else 0.0

    def counted(self, run: Run) -> bool:
        """Whether it comes from the counters of a server."""
        return (
            self.name in _COUNTED and getattr(run, _TOTALS[self.name]) is None
        ) and run.counters is not None


_COUNTED = ("token_hit_rate", "missed_by_state_tokens")
_TOTALS = {
    "token_hit_rate": "hit_tokens",
    "missed_by_state_tokens": "missed_by_state_tokens",
    "recompute_cost": "recompute_cost",
}
# The second and the third are a request, the others but the first are of servers alone.
MEASURES = (
    Measure("token_hit_rate", True),
    Measure("missed_by_state_tokens", False),
    Measure("recompute_cost", False),
    Measure("ttft_p50_ms", False),
    Measure("ttft_p90_ms", False),
    Measure("ttft_p99_ms", False),
    Measure("itl_p50_ms", False),
    Measure("itl_p99_ms", False),
    Measure("output_tokens_per_second", True),
    Measure("request_errors", False),
    Measure("peak_resident_mib", False),
)
