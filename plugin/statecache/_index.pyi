"""The native state index. Contracts in full: cpp/include/statecache/state_index.h.

Ids are any integers of 64 bits. An id that is not resident raises `KeyError`, what is no integer
`TypeError`, any other bad argument `ValueError`, a walk used out of order `RuntimeError`; each
names the id, and a call that raises changes nothing.
"""

from collections.abc import Iterable

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
    state) or "lru" (every priority is 0; ties go to the least recently used). O(log n) a call.
    """

    def __init__(self, policy: str = "gds", cost: CostModel = ...) -> None: ...
    def insert(
        self,
        state: int,
        depth: int,
        parent: int | None = None,
        children: Iterable[int] = (),
    ) -> None:
        """Make `state` resident at `depth` tokens (0 to 2**31 - 1) and stamp it.

        `parent` is the nearest shallower resident state on its path, `children` all states that
        now sit directly below it: each must be deeper and hang under `parent` now. A child left
        out cannot be noticed. O((1 + c) log n) for c children.
        """

    def touch(self, state: int) -> None:
        """Stamp `state` with the watermark: matched, cached again, or loaded back from host."""

    def pin(self, state: int) -> None:
        """Hold `state`: no victim until unpinned as often, still a shallower neighbour."""

    def unpin(self, state: int) -> None:
        """Undo one pin; the last one stamps."""

    def erase(self, state: int) -> None:
        """Forget `state`, pinned or not: children get its parent, the watermark stays."""

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

    @property
    def watermark(self) -> float: ...
    def check(self) -> None:
        """Verify every invariant in O(n); raise `RuntimeError` naming the first one broken."""

    def __len__(self) -> int: ...
    def __contains__(self, state: object) -> bool: ...
