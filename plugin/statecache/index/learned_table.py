"""What `learned` has seen: how often states of a kind and age are resumed, and what to expect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

__all__ = ["BUCKETS", "EVERY", "FADING", "LearnedTable", "age_bucket", "floor_log2"]

BUCKETS = 16
ROLES = 6
KINDS = 16
EVERY = 16  # requests between two counts of exposure
FADING = 0.9726549474122855  # of what was seen by then: halves in 400 requests
_ROLE_PRIORS = (1.0, 0.3, 0.3, 0.05, 0.05, 0.05)


def floor_log2(number: int) -> int:
    """Return the largest n with 2**n <= `number`, 0 below 1."""
    return max(number, 1).bit_length() - 1


def age_bucket(age: int) -> int:
    """Return the bucket of an age in requests: 0 below 2, then by powers of two."""
    return min(BUCKETS - 1, floor_log2(age))


class LearnedTable:
    """Resumptions and exposure by role, kind and age bucket, and the index made from them."""

    def __init__(self) -> None:
        self._role_hits = [[0.0] * BUCKETS for _ in range(ROLES)]
        self._role_exposure = [[0.0] * BUCKETS for _ in range(ROLES)]
        self._hits = [[[0.0] * BUCKETS for _ in range(KINDS)] for _ in range(ROLES)]
        self._exposure = [[[0.0] * BUCKETS for _ in range(KINDS)] for _ in range(ROLES)]
        self._chances: list[list[list[float]]] = []
        self._index: list[list[list[float]]] = []
        self.rebuild()

    def expose(self, members: Iterable[tuple[int, int, int]]) -> None:
        """Count members, by role, kind and bucket, that `EVERY` requests could have resumed."""
        cells = Counter(members)
        roles: Counter[tuple[int, int]] = Counter()
        for (role, kind, bucket), count in cells.items():
            self._exposure[role][kind][bucket] += EVERY * count
            roles[role, bucket] += count
        for (role, bucket), count in roles.items():
            self._role_exposure[role][bucket] += EVERY * count

    def hit(self, role: int, kind: int, bucket: int) -> None:
        """Count a state that was resumed, or would have been."""
        self._role_hits[role][bucket] += 1
        self._hits[role][kind][bucket] += 1

    def fade(self) -> None:
        """Let what was seen count less."""
        for rows in (self._role_hits, self._role_exposure, *self._hits, *self._exposure):
            for row in rows:
                row[:] = [FADING * count for count in row]

    def rebuild(self) -> None:
        """Bring the index up to date."""
        self._chances = [
            [self._rates(role, kind) for kind in range(KINDS)] for role in range(ROLES)
        ]
        self._index = [[gittins(rates) for rates in of_role] for of_role in self._chances]

    def rate(self, role: int, kind: int, bucket: int) -> float:
        """Return the chance that one request resumes a state, as of the last rebuild."""
        return self._chances[role][kind][bucket]

    def index(self, role: int, kind: int, bucket: int) -> float:
        """Return how much a state is worth for each unit of its gain, as of the last rebuild."""
        return self._index[role][kind][bucket]

    def _rates(self, role: int, kind: int) -> list[float]:
        rates = []
        for b in range(BUCKETS):
            prior = 0.25 / max(1, 2**b if b else 0) * _ROLE_PRIORS[role]
            of_role = (self._role_hits[role][b] + 0.5) / (
                self._role_exposure[role][b] + 0.5 / prior
            )
            of_kind = (self._hits[role][kind][b] + 1) / (
                self._exposure[role][kind][b] + 1 / of_role
            )
            rates.append(min(0.999, of_kind))
        return rates


def gittins(rates: list[float]) -> list[float]:
    """Return for each age bucket the best ratio of chance to time, over all ages to stop at.

    `rates` are the chances of being resumed by one request. Ratios are compared by
    multiplication and divided once.
    """
    kept, resumed, waited = [], [], []
    for b, rate in enumerate(rates):
        left = 1.0 - rate
        for _ in range(max(1, b)):  # to the power of the bucket's width
            left *= left
        kept.append(left)
        resumed.append(1.0 - left)
        waited.append((1.0 - left) / rate)
    index = []
    for b in range(len(rates)):
        alive, chance, time = 1.0, 0.0, 0.0
        best_chance, best_time = 0.0, 1.0
        for j in range(b, len(rates)):
            chance += alive * resumed[j]
            time += alive * waited[j]
            alive *= kept[j]
            if chance * best_time > best_chance * time:
                best_chance, best_time = chance, time
            if alive < 1e-6:
                break
        index.append(best_chance / best_time)
    return index
