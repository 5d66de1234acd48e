"""The native state index. Contracts in full: cpp/include/statecache/state_index.h.

Ids are any integers of 64 bits. An id that is not resident raises `KeyError`, what is no integer
`TypeError`, any other bad argument `ValueError`, a walk used out of order `RuntimeError`; each
names the id, and a call that raises changes nothing.
"""

from collections.abc import Iterable

POLICIES: tuple[str, ...]
"""The names of the policies, in the order of the C++ table."""

class CostModel:
    """cost(a, b) = linear * (b - a) + quadratic * (b*b - a*a) / 2e5, in IEEE doubles.

    Raises `ValueError` unless both coefficients are finite and >= 0, one of them is above 0, and
    the deepest possible state costs at most 1e280.
    """

    def __init__(self, linear: float = 1.862e-5, quadratic: float = 3.33e-6) -> None: ...
    @property
    def linear(self) -> float: ...
    @property
    def quadratic(self) -> float: ...
    def cost(self, from_depth: int, to_depth: int) -> float:
        """Return the cost of computing tokens `from_depth` (excluded) to `to_depth`."""

class StateIndex:
    """Decides which resident state to evict next. Single-threaded by contract.

    `policy` is "gds" (priority = watermark at last use + cost from the nearest shallower resident
    state), "gds-tips" (the square root of that cost, and none in the middle of a path, where the
    only state directly below has others below), "lru" (every priority is 0; ties go to the least
    recently used) or "learned" (the chance that this state is the one resumed, learnt by kind and
    age, times its gain; an id is then the key of a prefix: the same one after an eviction).
    O(log n) a call.

    With `slots` "learned" plays itself, gds and lru beside the cache, without data, and evicts in
    the order of the one that saves most. It remembers `ghosts` evicted states. The other policies
    ignore `slots`, `ghosts`, `end` and `on_prompt`.
    """

    def __init__(
        self,
        policy: str = "gds",
        cost: CostModel = ...,
        slots: int | None = None,
        ghosts: int = 4096,
    ) -> None: ...
    def on_prompt(
        self, points: Iterable[int], depths: Iterable[int], resumable: int, admitted: Iterable[int]
    ) -> None:
        """Note that a prompt was looked up.

        `points` are the keys of the points of its path, as many as are known, with their `depths`
        in tokens, shallowest first. The prompt may resume at the first `resumable` of them;
        `admitted` are those that will be offered for caching wherever it resumes, shallowest first;
        the last one is the prompt's end.
        """

    def insert(
        self,
        state: int,
        depth: int,
        parent: int | None = None,
        children: Iterable[int] = (),
        *,
        end: bool = False,
    ) -> None:
        """Make `state` resident at `depth` tokens (0 to 2**31 - 1) and stamp it.

        `parent` is the nearest shallower resident state on its path, `children` all states that
        now sit directly below it: each must be deeper and hang under `parent` now. A child left
        out cannot be noticed. `end` says that this is the end of a prompt. O((1 + c) log n) for c
        children.
        """

    def touch(self, state: int, *, end: bool = False) -> None:
        """Stamp `state` with the watermark: matched, cached again, or loaded back from host.

        `end` says that it is cached again, as the end of a prompt.
        """

    def pin(self, state: int) -> None:
        """Hold `state`: no victim until unpinned as often, still a shallower neighbour."""

    def unpin(self, state: int) -> None:
        """Undo one pin; the last one stamps."""

    def erase(self, state: int) -> None:
        """Forget `state`, pinned or not: children get its parent, the watermark stays."""

    def drop(self, points: Iterable[int]) -> None:
        """Forget all about these points: what is needed to resume from them is gone."""

    def begin_walk(self) -> None:
        """Start one eviction pass."""

    def next_victim(self) -> int | None:
        """Propose the lowest unpinned state that this walk has not proposed, if any."""

    def evicted(self, state: int) -> None:
        """Confirm a proposal of this walk: remove it, raise the watermark to its priority."""

    def end_walk(self) -> None:
        """End the pass; proposals not confirmed stay as they were."""

    def evict(self, n: int) -> list[int]:
        """Evict up to `n` states in one pass, lowest first; fewer when the rest is pinned."""

    def priority(self, state: int) -> float:
        """Return the true priority of `state`, pinned or not."""

    def rank(self, state: int) -> float:
        """Return what the lowest of is evicted next: learned's own measure, else the priority."""

    @property
    def policy(self) -> str:
        """The name that it was made with."""

    @property
    def needs_prompts(self) -> bool:
        """Whether `on_prompt` does anything; then an id is the key of a prefix."""

    @property
    def order(self) -> str:
        """The policy whose order is followed now: its own, or the one that learned has chosen."""

    @property
    def ghosts(self) -> int:
        """How many evicted states it remembers."""

    @property
    def points(self) -> int:
        """How many prefix points it knows: those of states, ghosts and recent prompts."""

    @property
    def watermark(self) -> float: ...
    def check(self) -> None:
        """Verify every invariant in O(n); raise `RuntimeError` naming the first one broken."""

    def __len__(self) -> int: ...
    def __contains__(self, state: object) -> bool: ...
