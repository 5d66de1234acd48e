"""How to split a GPU's memory between KV, running states and kept states: splits, played and rated.

How an engine divides its memory, and what the built-in replay plays of it, is said by a class of
its adapter (`EngineSpec.sizing`), which is an `EngineSplits`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from statecache.checkpoint.formats import FORMATS
from statecache.engine.spec import EngineSpec, engine_named
from statecache.errors import SettingsError
from statecache.replay.prefix_tree import PrefixTree
from statecache.sizing.model_config import HybridModel, sizing_of
from statecache.trace.format import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Demand", "EngineSplits", "Split", "best_splits", "rated_splits"]


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked for; memory and bytes are those of one tensor-parallel rank.

    `shares` are percents, for kept states, of what running states leave; `running` is the number
    of requests at once; types are None for what the engine chooses; `draft_tokens` are those that a
    drafter proposes in each step, 0 without one.
    """

    model: HybridModel
    memory_bytes: int
    engines: list[str]
    shares: list[int]
    running: int
    slots_a_request: int | None = None
    ranks: int = 1
    kv_dtype: str | None = None
    state_dtype: str | None = None
    block_tokens: int | None = None
    chunk_tokens: int = 8192
    draft_tokens: int = 0

    @property
    def combinations(self) -> int:
        """The number of splits."""
        return sum(sizing_of(engine).combinations(self) for engine in self.engines)


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """One way to divide the memory, and how many of the trace's prompt tokens it reuses.

    `states` says how states are kept: native or int8, in slots of their own, or shared, in the
    blocks of KV. `active_slots` are those of running requests. Of all `requests` those are rejected
    that cannot fit, alone: their tokens count as not reused.
    """

    engine: str
    states: str
    share: int
    active_slots: int
    kept_slots: int | None
    kv_tokens: int
    active_bytes: int
    kept_bytes: int
    kv_bytes: int
    prompt_tokens: int
    hit_tokens: int
    requests: int
    rejected: int
    flags: list[str]

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that is reused."""
        return self.hit_tokens / self.prompt_tokens


def best_splits(splits: list[Split]) -> dict[str, Split]:
    """Return the best one of each engine: fewest requests rejected, most tokens reused, most KV.

    An engine whose splits reject every request has none.
    """
    best: dict[str, Split] = {}
    for split in splits:
        known = best.get(split.engine)
        serves = split.rejected < split.requests
        if serves and (known is None or _worth(split) > _worth(known)):
            best[split.engine] = split
    return best


def _worth(split: Split) -> tuple[int, int, int]:
    return -split.rejected, split.hit_tokens, split.kv_tokens


def rated_splits(demand: Demand, tree: PrefixTree) -> Iterator[Split]:
    """Play every split. Raises `SettingsError` if running states alone do not fit."""
    for engine in demand.engines:
        made: EngineSplits = sizing_of(engine)(engine_named(engine), demand, tree)
        yield from made.splits()


class EngineSplits:
    """Divides the memory for one engine. An adapter's own class says how, and names the flags."""

    block_grows = False
    """Whether the engine makes its blocks larger than they were asked for."""

    def __init__(self, spec: EngineSpec, demand: Demand, tree: PrefixTree) -> None:
        self.engine = spec.name
        model, asked = demand.model, demand.state_dtype
        self.demand, self.tree = demand, tree
        self.kv_token = model.kv_token_bytes(demand.kv_dtype)
        if demand.draft_tokens:
            self.kv_token += model.draft_kv_token_bytes(demand.kv_dtype)
        self.state = model.state_bytes(self.engine, asked)
        self.kept = {name: model.bytes_at_rest(name, self.engine, asked) for name in FORMATS}
        self.active = demand.running * (demand.slots_a_request or spec.slots_per_request)
        self.prompt_tokens = sum(len(path) for path in tree.paths) * BLOCK_TOKENS
        self.free = demand.memory_bytes - self.active_bytes()
        if self.free < BLOCK_TOKENS * self.kv_token:
            raise SettingsError(
                f"--memory: {demand.memory_bytes:,} bytes do not hold the states of"
                f" {demand.running} running requests in {self.engine}, {self.active_bytes():,}"
                f" bytes, and a block of KV"
            )

    @staticmethod
    def state_dtypes(model: HybridModel, asked: str | None) -> tuple[str, str]:
        """Return the types of the convolution and the temporal state; `asked` is for the latter."""
        return model.dtype, asked or model.dtype

    @staticmethod
    def block_tokens(demand: Demand) -> int | None:
        """Return the tokens of a block of KV; None where the engine keeps it by tokens."""
        return demand.block_tokens

    @classmethod
    def combinations(cls, demand: Demand) -> int:
        """Return how many splits there are to play."""
        return len(FORMATS) * len(demand.shares)

    def active_bytes(self) -> int:
        """Return the bytes of the states of running requests."""
        return self.active * self.state

    def splits(self) -> Iterator[Split]:
        """Play each split."""
        for kind in self.kept:
            for share in self.demand.shares:
                split = self.split(kind, share)
                if split is not None:
                    yield split

    def split(self, kind: str, share: int) -> Split | None:
        """Return the split with this share, None if it keeps no state or no KV."""
        slots = self.free * share // 100 // self.kept[kind]
        left = self.free - slots * self.kept[kind]
        return self.play_split(kind, share, slots, left) if slots > 0 else None

    def play_split(self, kind: str, share: int, slots: int, kv_bytes: int) -> Split | None:
        """Play the split with so many slots for states kept as `kind` says; None without room."""
        raise NotImplementedError

    def kv_tokens(self, kv_bytes: int) -> int:
        """Return the tokens of KV that fit, in whole blocks of the engine."""
        block = self.demand.block_tokens or 1
        return kv_bytes // (block * self.kv_token) * block

    def build_split(
        self,
        kind: str,
        share: int,
        slots: int | None,
        kv_bytes: int,
        hit_tokens: int,
        rejected: int,
        flags: list[str],
    ) -> Split:
        """Return the split with what was reused in it, and the engine's flags for it."""
        return Split(
            engine=self.engine,
            states=kind,
            share=share,
            active_slots=self.active,
            kept_slots=slots,
            kv_tokens=self.kv_tokens(kv_bytes),
            active_bytes=self.active_bytes(),
            kept_bytes=0 if slots is None else slots * self.kept[kind],
            kv_bytes=kv_bytes,
            prompt_tokens=self.prompt_tokens,
            hit_tokens=hit_tokens,
            requests=len(self.tree.paths),
            rejected=rejected,
            flags=["--kv-cache-plugin statecache", *flags],
        )
