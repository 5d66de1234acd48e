"""The prompts of a run: tokens of the workload's blocks, and what the server answered before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from statecache.trace.format import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statecache.ab.drivers.block_tokens import BlockTokens
    from statecache.ab.workloads import Asked

__all__ = ["Prompts"]


class Prompts:
    """Makes the prompts of one run.

    With `answers`, what a server answered stands in the next prompt of its session: where that
    goes on from the one before, the tokens that follow the earlier prompt are those of the answer,
    as many as find room in the blocks that are new. Their number stays, so that arms whose answers
    differ are still asked prompts of one length. A block that was asked before the answer was known
    (another session has it too) keeps its tokens: equal blocks are equal tokens in all of a run.
    """

    def __init__(self, tokens: BlockTokens, asked: Sequence[Asked], *, answers: bool) -> None:
        self._tokens = tokens
        self._asked = asked
        self._following = _following(asked) if answers else {}
        self._answered: dict[int, list[int]] = {}  # by block: what was answered, at its start
        self._used: set[int] = set()

    def of(self, number: int) -> tuple[list[int], int]:
        """Return the tokens of a request, and how many of them a server had answered."""
        blocks = _blocks(self._asked[number])
        if self._following:
            self._used.update(blocks)
        prompt: list[int] = []
        from_answers = 0
        for block in blocks:
            answered = self._answered.get(block, [])
            from_answers += len(answered)
            prompt += answered
            prompt += self._tokens.of(block)[len(answered) :]
        return prompt, from_answers

    def answer(self, number: int, tokens: Sequence[int]) -> None:
        """Take in what request `number` was answered."""
        following = self._following.get(number)
        if following is None:
            return
        so_far, longer = _blocks(self._asked[number]), _blocks(self._asked[following])
        if longer[: len(so_far)] != so_far:  # the session went back to an earlier point
            return
        each = self._tokens.tokens_a_block
        for place, block in enumerate(longer[len(so_far) :]):
            part = list(tokens[place * each : (place + 1) * each])
            if not part or block in self._used or block in self._answered:
                return
            self._answered[block] = part


def _blocks(request: Asked) -> list[int]:
    return request.hash_ids[: request.input_length // BLOCK_TOKENS]


def _following(asked: Sequence[Asked]) -> dict[int, int]:
    """Return for each request the next one of its session, by number."""
    last: dict[int | str, int] = {}
    following: dict[int, int] = {}
    for number, request in enumerate(asked):
        if request.session_id is not None:
            if request.session_id in last:
                following[last[request.session_id]] = number
            last[request.session_id] = number
    return following
