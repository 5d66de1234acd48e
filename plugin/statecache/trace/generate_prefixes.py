"""Generated workloads of many prompts on a few prefixes."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec

from statecache.errors import SettingsError
from statecache.trace.format import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["DistinctPrefixes", "SharedPrefix", "prefix_lines"]

_PAUSE_MS = 100
_OUTPUT_TOKENS = 16


class _Prefixes(msgspec.Struct, frozen=True, kw_only=True):
    count: int = 256
    rounds: int = 4
    prefix_tokens: int = 1024
    own_tokens: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("count", "rounds"):
            if not 1 <= getattr(self, name) <= 1_000_000:
                raise SettingsError(f"{name} is {getattr(self, name)}: give 1 to 1000000")
        for name, least in (("prefix_tokens", BLOCK_TOKENS), ("own_tokens", 0)):
            tokens = getattr(self, name)
            if not least <= tokens <= 1_000_000 or tokens % BLOCK_TOKENS:
                raise SettingsError(
                    f"{name.replace('_', '-')} is {tokens}: give a multiple of {BLOCK_TOKENS}"
                    f" from {least} to 1000000"
                )
        if not 0 <= self.seed < 2**63:
            raise SettingsError(f"seed is {self.seed}: give 0 to {2**63 - 1}")


class DistinctPrefixes(_Prefixes, frozen=True, kw_only=True):
    """`count` prefixes, asked one after the other, `rounds` times over; each ends in own tokens."""


class SharedPrefix(_Prefixes, frozen=True, kw_only=True):
    """As many requests, each on one of `count` prefixes drawn at random, some far more often."""


def prefix_lines(workload: DistinctPrefixes | SharedPrefix) -> Iterator[bytes]:
    """Yield the trace line by line; the same workload gives the same bytes everywhere.

    The first line names the seed. Distinct prefixes are the same at every seed.
    """
    rng = random.Random(workload.seed)  # noqa: S311 - a workload, not a secret
    prefix = workload.prefix_tokens // BLOCK_TOKENS
    own = workload.own_tokens // BLOCK_TOKENS
    for number in range(workload.count * workload.rounds):
        chosen = number % workload.count
        if isinstance(
            workload, SharedPrefix
        ):  # products of draws, which every platform rounds alike
            chosen = int(workload.count * rng.random() * rng.random())
        first = workload.count * prefix + number * own
        ids = [*range(chosen * prefix, (chosen + 1) * prefix), *range(first, first + own)]
        line: dict[str, object] = {
            "timestamp": number * _PAUSE_MS,
            "input_length": len(ids) * BLOCK_TOKENS,
            "output_length": _OUTPUT_TOKENS,
            "hash_ids": ids,
        }
        if number == 0:
            line["seed"] = workload.seed
        yield msgspec.json.encode(line, order="sorted") + b"\n"
