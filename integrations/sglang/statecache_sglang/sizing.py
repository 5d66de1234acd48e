"""How SGLang divides a GPU's memory, for `statecache plan`."""

from __future__ import annotations

from statecache.index.policies import DEFAULT_WITHOUT_PROMPTS
from statecache.replay.kv_residency import kv_timeline
from statecache.replay.schedule import make_schedule
from statecache.replay.state_slots import replay
from statecache.sizing.model_config import HybridModel
from statecache.sizing.splits import EngineSplits, Split
from statecache.trace.format import BLOCK_TOKENS

__all__ = ["SglangSplits"]


class SglangSplits(EngineSplits):
    """SGLang: running and kept states share one pool of slots, unless kept ones are in int8."""

    @staticmethod
    def state_dtypes(model: HybridModel, asked: str | None) -> tuple[str, str]:
        """SGLang 0.5.23 keeps bfloat16 and, unless the model says otherwise, float32."""
        return "bfloat16", asked or model.named_state_dtype.get("mamba_ssm_dtype") or "float32"

    def active_bytes(self) -> int:
        """Return the bytes of the states of running requests, and of their drafts.

        A verify step checks the token that is certain, too. Slot 0 is reserved, and so is a row.
        """
        drafts, running = self.demand.draft_tokens, self.demand.running
        verified = (running + 1) * (drafts + 1) if drafts else 0
        return (self.active + 1 + verified) * self.state

    def split(self, kind: str, share: int) -> Split | None:
        """Return the split with this share; the int8 pool reserves a slot, too."""
        if kind == "native":
            return super().split(kind, share)
        bytes_per_state = self.kept[kind]
        slots = self.free * share // 100 // bytes_per_state - 1
        return (
            self.play_split(kind, share, slots, self.free - (slots + 1) * bytes_per_state)
            if slots > 0
            else None
        )

    def play_split(self, kind: str, share: int, slots: int, kv_bytes: int) -> Split | None:
        """Play the split: KV by tokens, the index rules the slots."""
        tokens = self.kv_tokens(kv_bytes)
        if tokens < BLOCK_TOKENS:
            return None
        kv = kv_timeline(self.tree, tokens)
        row = replay(
            make_schedule(self.tree, kv, "dense", self.demand.chunk_tokens),
            DEFAULT_WITHOUT_PROMPTS,
            slots,
        )
        demand = self.demand
        flags = [f"--max-running-requests {demand.running}"]
        if kind == "native":
            flags.append(f"--max-mamba-cache-size {self.active + slots}")
        else:
            flags.append(f"--max-mamba-cache-size {self.active}")
            flags.append(f"--statecache-checkpoints {kind} --statecache-checkpoint-slots {slots}")
        flags += [f"--page-size {demand.block_tokens}"] if demand.block_tokens else []
        flags += [f"--tp-size {demand.ranks}"] if demand.ranks > 1 else []
        flags += ["--kv-cache-dtype fp8_e4m3"] if demand.kv_dtype == "fp8" else []
        if demand.draft_tokens:
            flags.append(
                f"--speculative-algorithm NEXTN --speculative-num-steps {demand.draft_tokens}"
                " --speculative-eagle-topk 1"
                f" --speculative-num-draft-tokens {demand.draft_tokens + 1}"
            )
        flags += [f"--mamba-ssm-dtype {demand.state_dtype}"] if demand.state_dtype else []
        return self.build_split(kind, share, slots, kv_bytes, row.hit_tokens, row.rejected, flags)
