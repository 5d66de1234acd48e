"""From the blocks of a workload to token ids, so that servers can be asked without any text."""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache

__all__ = ["BlockTokens"]

_REMEMBERED_BLOCKS = 4_096


class BlockTokens:
    """Gives each block its tokens: a hash of salt, block id and position.

    With another salt the same workload has other tokens, so that no server knows a prompt from an
    earlier run. Tokens are taken from the middle three quarters of the vocabulary: special ones
    stand at its ends.
    """

    def __init__(self, salt: str, vocabulary: int, tokens_a_block: int) -> None:
        self.tokens_a_block = tokens_a_block
        self._salt = salt
        self._first = vocabulary // 8
        self._choices = vocabulary - 2 * self._first
        self._format = struct.Struct(f"<{tokens_a_block}I")
        self._remembered = lru_cache(_REMEMBERED_BLOCKS)(self._tokens)

    def of(self, block: int) -> list[int]:
        """Return the tokens of a block; they are not to be changed."""
        return self._remembered(block)

    def prompt(self, blocks: list[int]) -> list[int]:
        """Return the tokens of a prompt."""
        return [token for block in blocks for token in self.of(block)]

    def _tokens(self, block: int) -> list[int]:
        stream = hashlib.shake_128(f"{self._salt} {block}".encode()).digest(self._format.size)
        return [self._first + number % self._choices for number in self._format.unpack(stream)]
