"""How to split a GPU's memory between KV, running states and kept states: splits, played and rated.

The built-in replay plays each split. SGLang: KV and slots, ruled by gds, a state at every chunk's
end. vLLM: one pool of blocks, or a checkpoint pool beside it, as the plugin runs them.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

import msgspec

from statecache.checkpoint.formats import FORMATS
from statecache.errors import SettingsError
from statecache.index.policies import DEFAULT
from statecache.replay.block_pools import SlotRule, replay_pool, replay_slots
from statecache.replay.kv_residency import kv_timeline
from statecache.replay.prefix_tree import PrefixTree, PreorderTree
from statecache.replay.schedule import make_schedule
from statecache.replay.shared_pool import MOST_BLOCKS
from statecache.replay.state_slots import replay
from statecache.sizing.model_config import HybridModel
from statecache.trace.format import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Demand", "Split", "best_splits", "rated_splits"]

SLOTS_A_REQUEST = {"sglang": 5, "vllm": 2}


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked for; memory and bytes are those of one tensor-parallel rank.

    `shares` are percents, for kept states, of what running states leave; `running` is the number
    of requests at once; types are None for what the engine chooses.
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

    @property
    def combinations(self) -> int:
        """The number of splits."""
        return sum(2 * len(self.shares) + (engine == "vllm") for engine in self.engines)


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
    players = {"sglang": _Sglang, "vllm": _Vllm}
    for engine in demand.engines:
        player = players[engine](demand, tree)
        yield from player.splits()


class _Player:
    """Divides the memory for one engine."""

    engine = ""

    def __init__(self, demand: Demand, tree: PrefixTree) -> None:
        model, asked = demand.model, demand.state_dtype
        self.demand, self.tree = demand, tree
        self.kv_token = model.kv_token_bytes(demand.kv_dtype)
        self.state = model.state_bytes(self.engine, asked)
        self.kept = {name: model.bytes_at_rest(name, self.engine, asked) for name in FORMATS}
        self.active = demand.running * (demand.slots_a_request or SLOTS_A_REQUEST[self.engine])
        self.prompt_tokens = sum(len(path) for path in tree.paths) * BLOCK_TOKENS
        self.free = demand.memory_bytes - self.active_bytes()
        if self.free < BLOCK_TOKENS * self.kv_token:
            raise SettingsError(
                f"--memory: {demand.memory_bytes:,} bytes do not hold the states of"
                f" {demand.running} running requests in {self.engine}, {self.active_bytes():,}"
                f" bytes, and a block of KV"
            )

    def active_bytes(self) -> int:
        return self.active * self.state

    def splits(self) -> Iterator[Split]:
        for kind in self.kept:
            for share in self.demand.shares:
                split = self.split(kind, share)
                if split is not None:
                    yield split

    def split(self, kind: str, share: int) -> Split | None:
        """Return the split with this share, None if it keeps no state or no KV."""
        slots = self.free * share // 100 // self.kept[kind]
        left = self.free - slots * self.kept[kind]
        return self.played(kind, share, slots, left) if slots > 0 else None

    def played(self, kind: str, share: int, slots: int, kv_bytes: int) -> Split | None:
        raise NotImplementedError

    def kv_tokens(self, kv_bytes: int) -> int:
        """Return the tokens of KV that fit, in whole blocks of the engine."""
        block = self.demand.block_tokens or 1
        return kv_bytes // (block * self.kv_token) * block

    def made(
        self,
        kind: str,
        share: int,
        slots: int | None,
        kv_bytes: int,
        hit_tokens: int,
        rejected: int,
        flags: list[str],
    ) -> Split:
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


class _Sglang(_Player):
    """SGLang: running and kept states share one pool of slots, unless kept ones are in int8."""

    engine = "sglang"

    def active_bytes(self) -> int:
        return (self.active + 1) * self.state  # slot 0 is reserved

    def split(self, kind: str, share: int) -> Split | None:
        if kind == "native":
            return super().split(kind, share)
        one = self.kept[kind]
        slots = self.free * share // 100 // one - 1
        return self.played(kind, share, slots, self.free - (slots + 1) * one) if slots > 0 else None

    def played(self, kind: str, share: int, slots: int, kv_bytes: int) -> Split | None:
        tokens = self.kv_tokens(kv_bytes)
        if tokens < BLOCK_TOKENS:
            return None
        kv = kv_timeline(self.tree, tokens)
        row = replay(
            make_schedule(self.tree, kv, "dense", self.demand.chunk_tokens), DEFAULT, slots
        )
        demand = self.demand
        flags = [f"--max-running-requests {demand.running}"]
        if kind == "native":
            flags.append(f"--max-mamba-cache-size {self.active + slots}")
        else:
            flags.append(f"--max-mamba-cache-size {self.active}")
            flags += ["--statecache-int8", f"--statecache-int8-slots {slots}"]
        flags += [f"--page-size {demand.block_tokens}"] if demand.block_tokens else []
        flags += [f"--tp-size {demand.ranks}"] if demand.ranks > 1 else []
        flags += ["--kv-cache-dtype fp8_e4m3"] if demand.kv_dtype == "fp8" else []
        flags += [f"--mamba-ssm-dtype {demand.state_dtype}"] if demand.state_dtype else []
        return self.made(kind, share, slots, kv_bytes, row.hit_tokens, row.rejected, flags)


class _Vllm(_Player):
    """vLLM: running states are blocks; kept ones are blocks too, or have a pool of their own.

    A state in blocks takes as many as there are state layers for an attention layer, each as large
    as a layer's state rounded up.
    """

    engine = "vllm"

    def __init__(self, demand: Demand, tree: PrefixTree) -> None:
        model = demand.model
        self.block = model.vllm_block_tokens(
            demand.block_tokens or 16, demand.kv_dtype, demand.state_dtype
        )
        self.blocks_a_state = -(-model.state_layers // model.attention_layers)
        super().__init__(demand, tree)
        self.preorder = PreorderTree.of(tree)

    def active_bytes(self) -> int:
        return self.active * self.blocks_a_state * self.block * self.kv_token

    def kv_tokens(self, kv_bytes: int) -> int:
        return kv_bytes // (self.block * self.kv_token) * self.block

    def splits(self) -> Iterator[Split]:
        pool = self.free // (BLOCK_TOKENS * self.kv_token)
        if pool > MOST_BLOCKS:
            raise SettingsError(
                f"--memory: {self.demand.memory_bytes:,} bytes are {pool:,} blocks of KV: give at"
                f" most {MOST_BLOCKS:,}"
            )
        state = max(1, round(self.blocks_a_state * self.block / BLOCK_TOKENS))
        every = self.demand.chunk_tokens // BLOCK_TOKENS
        row = replay_pool(self.tree, pool, "reuse", "junctions", state, every)
        yield self.made("shared", 0, None, self.free, row.hit_tokens, row.rejected, self.flags())
        yield from super().splits()

    def played(self, kind: str, share: int, slots: int, kv_bytes: int) -> Split | None:
        block = BLOCK_TOKENS * self.kv_token
        pool, state = self.free // block, self.kept[kind] / block
        if math.floor(pool - slots * Fraction(str(state))) < 1:
            return None
        row = replay_slots(
            self.preorder,
            pool,
            slots,
            SlotRule(),
            "dense+junctions",
            state,
            self.demand.chunk_tokens // BLOCK_TOKENS,
        )
        keep = "--statecache-int8" if kind == "int8" else "--statecache-checkpoints native"
        flags = [*self.flags(), keep, f"--statecache-checkpoint-slots {slots}"]
        return self.made(kind, share, slots, kv_bytes, row.hit_tokens, row.rejected, flags)

    def flags(self) -> list[str]:
        demand = self.demand
        flags = [f"--max-num-seqs {demand.running}"]
        flags += [f"--block-size {demand.block_tokens}"] if demand.block_tokens else []
        flags += [f"--tensor-parallel-size {demand.ranks}"] if demand.ranks > 1 else []
        flags += ["--kv-cache-dtype fp8"] if demand.kv_dtype == "fp8" else []
        if demand.state_dtype:
            flags.append(f"--mamba-ssm-cache-dtype {demand.state_dtype}")
        return flags
