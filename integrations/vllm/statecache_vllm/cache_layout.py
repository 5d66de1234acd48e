"""How the cache of one scheduler is divided: groups of layers, and tokens of a block."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from statecache.checkpoint.proof import Prefix
from statecache.index.keyed_index import key_of
from statecache_vllm.views import Request

__all__ = ["CacheLayout"]


@dataclasses.dataclass(frozen=True)
class CacheLayout:
    """Groups by number, and the unit in which prompts are compared.

    `block_tokens` are the tokens of a block, of which vLLM takes `hashes_per_block` hashes; states
    are wanted every `interval` tokens, 0 for at no fixed distance. `drops_block` says that vLLM
    computes the last block of a hit again for a drafter, which needs the hidden states of it.
    """

    state_groups: tuple[int, ...]
    attention_groups: tuple[int, ...]
    block_tokens: int
    hashes_per_block: int
    interval: int
    drops_block: bool = False

    def path(self, request: Request, tokens: int) -> list[bytes]:
        """Return one hash for each full block of the first tokens of a request."""
        step, hashes = self.hashes_per_block, request.block_hashes
        count = min(tokens // self.block_tokens, len(hashes) // step)
        return list(hashes[step - 1 : count * step : step])

    def prefix(self, path: Sequence[bytes]) -> Prefix:
        """Return what a state at the end of `path` is of.

        A block hash of vLLM stands for all tokens up to its end, salt and adapter included.
        """
        return Prefix(key_of(path[-1]), len(path) * self.block_tokens)

    def end_block(self, tokens: int) -> int:
        """Return after how many blocks of a prompt the state of its end lies, 0 for nowhere."""
        return max(tokens // self.block_tokens - self.drops_block, 0)

    def offered_blocks(self, tokens: int) -> list[int]:
        """Return after how many blocks of a prompt states will be offered, as far as is known."""
        every, end = self.interval // self.block_tokens, self.end_block(tokens)
        between = range(every, end, every) if every else ()
        return [*between, end] if end else []
