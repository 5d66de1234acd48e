"""How vLLM divides a GPU's memory, for `statecache plan`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

import msgspec

from statecache.engine.spec import EngineSpec
from statecache.errors import SettingsError
from statecache.replay.block_pools import SlotRule, replay_pool, replay_slots
from statecache.replay.prefix_tree import PrefixTree, PreorderTree
from statecache.replay.shared_pool import MOST_BLOCKS
from statecache.sizing.model_config import DTYPE_BYTES, HybridModel
from statecache.sizing.splits import Demand, EngineSplits, Split
from statecache.trace.format import BLOCK_TOKENS

__all__ = ["VllmSplits", "block_tokens"]

# By family, the key of a config.json from which vLLM 0.32 takes the type of a temporal state.
_STATE_DTYPE_KEYS = {"qwen3_5": "mamba_ssm_dtype", "nemotron_h": "mamba_ssm_cache_dtype"}


def block_tokens(
    model: HybridModel, least: int = 16, kv: str | None = None, asked: str | None = None
) -> int:
    """Return the tokens of a block of vLLM, which makes it as large as a layer's state.

    It is a multiple of `least`, which the attention kernels choose, and of 128 with latent KV.
    """
    step = max(least, 128) if model.family == "kimi_linear" else least
    token = model.kv_values * DTYPE_BYTES[kv or model.dtype]
    return -(-model.layer_state_bytes("vllm", asked) // (step * token)) * step


class VllmSplits(EngineSplits):
    """vLLM: running states are blocks; kept ones are blocks too, or have a pool of their own.

    A state in blocks takes as many as there are state layers for an attention layer, each as large
    as a layer's state rounded up.
    """

    block_grows = True

    def __init__(self, spec: EngineSpec, demand: Demand, tree: PrefixTree) -> None:
        self.block = self.block_tokens(demand)
        model, layers = demand.model, demand.model.attention_layers
        if demand.draft_tokens:
            model = model.widened(demand.draft_tokens)
            layers += model.draft_layers
        self.blocks_a_state = -(-model.state_layers // layers)
        super().__init__(spec, msgspec.structs.replace(demand, model=model), tree)
        self.preorder = PreorderTree.of(tree)

    @staticmethod
    def state_dtypes(model: HybridModel, asked: str | None) -> tuple[str, str]:
        """VLLM 0.32 keeps the model's own type for both, but for some models float32."""
        key = _STATE_DTYPE_KEYS.get(model.family, "")
        exact = model.family in ("nemotron_h", "kimi_linear")
        named = asked or model.named_state_dtype.get(key)
        return model.dtype, named or ("float32" if exact else model.dtype)

    @staticmethod
    def block_tokens(demand: Demand) -> int:
        """Return the tokens of a block, which vLLM makes as large as a layer's state."""
        model = demand.model.widened(demand.draft_tokens)
        return block_tokens(model, demand.block_tokens or 16, demand.kv_dtype, demand.state_dtype)

    @classmethod
    def combinations(cls, demand: Demand) -> int:
        """Return how many splits there are: one pool for all, or a pool beside the blocks."""
        return super().combinations(demand) + 1

    def active_bytes(self) -> int:
        """Return the bytes of the states of running requests, with one more for each draft."""
        states = self.active + self.demand.running * self.demand.draft_tokens
        return states * self.blocks_a_state * self.block * self.kv_token

    def kv_tokens(self, kv_bytes: int) -> int:
        """Return the tokens of KV that fit."""
        return kv_bytes // (self.block * self.kv_token) * self.block

    def splits(self) -> Iterator[Split]:
        """Play one pool for all, then each pool beside the blocks."""
        pool = self.free // (BLOCK_TOKENS * self.kv_token)
        if pool > MOST_BLOCKS:
            raise SettingsError(
                f"--memory: {self.demand.memory_bytes:,} bytes are {pool:,} blocks of KV: give at"
                f" most {MOST_BLOCKS:,}"
            )
        state = max(1, round(self.blocks_a_state * self.block / BLOCK_TOKENS))
        every = self.demand.chunk_tokens // BLOCK_TOKENS
        row = replay_pool(self.tree, pool, "reuse", "branch-points", state, every)
        yield self.build_split(
            "shared", 0, None, self.free, row.hit_tokens, row.rejected, self.flags()
        )
        yield from super().splits()

    def play_split(self, kind: str, share: int, slots: int, kv_bytes: int) -> Split | None:
        """Play the split: KV by tokens, the index rules the slots."""
        block = BLOCK_TOKENS * self.kv_token
        pool, state = self.free // block, self.kept[kind] / block
        if math.floor(pool - slots * Fraction(str(state))) < 1:
            return None
        row = replay_slots(
            self.preorder,
            pool,
            slots,
            SlotRule(),
            "dense+branch-points",
            state,
            self.demand.chunk_tokens // BLOCK_TOKENS,
        )
        keep = f"--statecache-checkpoints {kind} --statecache-checkpoint-slots {slots}"
        flags = [*self.flags(), keep]
        return self.build_split(kind, share, slots, kv_bytes, row.hit_tokens, row.rejected, flags)

    def flags(self) -> list[str]:
        """Return the flags of every split."""
        demand = self.demand
        flags = [f"--max-num-seqs {demand.running}"]
        flags += [f"--block-size {demand.block_tokens}"] if demand.block_tokens else []
        flags += [f"--tensor-parallel-size {demand.ranks}"] if demand.ranks > 1 else []
        flags += ["--kv-cache-dtype fp8"] if demand.kv_dtype == "fp8" else []
        if demand.draft_tokens:
            flags.append(f"--spec-method mtp --spec-tokens {demand.draft_tokens}")
        if demand.state_dtype:
            flags.append(f"--mamba-ssm-cache-dtype {demand.state_dtype}")
        return flags
