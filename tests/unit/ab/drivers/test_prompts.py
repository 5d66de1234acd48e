"""Prompts of a run: what a server answered stands in the next prompt of its session."""

from statecache.ab.drivers.block_tokens import BlockTokens
from statecache.ab.drivers.prompts import Prompts
from statecache.ab.workloads import Asked

EACH = 4
TOKENS = BlockTokens("x", 800, EACH)


def asked(session: str | None, *blocks: int) -> Asked:
    """A request of whole blocks and a part of one more."""
    return Asked(512 * len(blocks) + 9, 100, [*blocks, 99], session)


def plain(*blocks: int) -> list[int]:
    return TOKENS.prompt(list(blocks))


def test_an_answer_stands_behind_its_prompt_in_the_next_ones() -> None:
    """Six tokens take the first new block and half of the second, now and ever after."""
    lines = [asked("s", 1), asked("s", 1, 2, 3), asked("s", 1, 2, 3, 4)]
    prompts = Prompts(TOKENS, lines, answers=True)
    assert prompts.of(0) == (plain(1), 0)
    prompts.answer(0, [11, 12, 13, 14, 15, 16])
    told = [*plain(1), 11, 12, 13, 14, 15, 16, *plain(3)[2:]]
    assert prompts.of(1) == (told, 6)
    prompts.answer(1, [21])
    assert prompts.of(2) == ([*told, 21, *plain(4)[1:]], 7)


def test_an_answer_that_is_longer_than_the_new_blocks_is_cut() -> None:
    prompts = Prompts(TOKENS, [asked("s", 1), asked("s", 1, 2)], answers=True)
    prompts.answer(0, [11, 12, 13, 14, 15, 16])
    assert prompts.of(1) == ([*plain(1), 11, 12, 13, 14], 4)


def test_without_the_wish_or_a_session_prompts_are_the_workloads() -> None:
    for answers, session in ((False, "s"), (True, None)):
        prompts = Prompts(TOKENS, [asked(session, 1), asked(session, 1, 2)], answers=answers)
        prompts.answer(0, [11])
        assert prompts.of(1) == (plain(1, 2), 0)


def test_a_session_that_goes_back_leaves_the_answer_out() -> None:
    """From 1, 2 back to 1 and on to 1, 3, 4; then once to no more than it was."""
    lines = [asked("s", 1, 2), asked("s", 1, 3, 4), asked("s", 1, 3, 4), asked("s", 1, 3, 4, 5)]
    prompts = Prompts(TOKENS, lines, answers=True)
    for number, answer in enumerate(([11], [21], [31])):
        prompts.of(number)
        prompts.answer(number, answer)
    assert prompts.of(1) == (plain(1, 3, 4), 0)
    assert prompts.of(3) == ([*plain(1, 3, 4), 31, *plain(5)[1:]], 1)


def test_a_block_that_was_asked_before_keeps_its_tokens() -> None:
    """Session b asks block 2 before the answer to a is known; c, which asks it later, has a's."""
    lines = [asked("a", 1), asked("b", 1, 2), asked("a", 1, 2), asked("a", 1, 2, 3)]
    prompts = Prompts(TOKENS, [*lines, asked("c", 1, 2, 3)], answers=True)
    assert prompts.of(0) == (plain(1), 0)
    assert prompts.of(1) == (plain(1, 2), 0)
    prompts.answer(0, [11])
    assert prompts.of(2) == (plain(1, 2), 0)
    prompts.answer(2, [21])
    assert prompts.of(3) == prompts.of(4) == ([*plain(1, 2), 21, *plain(3)[1:]], 1)


def test_sessions_do_not_mix() -> None:
    lines = [asked("a", 1), asked("b", 1), asked("b", 1, 3), asked("a", 1, 2)]
    prompts = Prompts(TOKENS, lines, answers=True)
    prompts.answer(0, [11])
    prompts.answer(1, [21])
    assert prompts.of(2) == ([*plain(1), 21, *plain(3)[1:]], 1)
    assert prompts.of(3) == ([*plain(1), 11, *plain(2)[1:]], 1)
