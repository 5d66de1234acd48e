"""The order in which a workload asks."""

import json
from pathlib import Path

import pytest

from statecache.ab.workloads import Workload
from statecache.errors import SettingsError
from statecache.trace.format import Request

# Sessions a, b, c and d with 3, 1, 2 and 1 requests; the number is that of the first block.
LINES = [("a", 1), ("b", 2), ("c", 3), ("a", 4), ("d", 5), ("a", 6), ("c", 7)]


def trace(folder: Path, lines: list[tuple[object, int]]) -> str:
    path = folder / "t.jsonl"
    path.write_text(
        "".join(
            json.dumps(
                {
                    "timestamp": 0,
                    "input_length": 512,
                    "output_length": 1,
                    "hash_ids": [block],
                    **({} if session is None else {"session_id": session}),
                }
            )
            + "\n"
            for session, block in lines
        )
    )
    return str(path)


@pytest.mark.parametrize(
    ("at_once", "order"),
    [
        (0, [1, 2, 3, 5, 4, 7, 6]),  # a b c d, a c, a
        (2, [1, 2, 4, 3, 6, 7, 5]),  # a b, then a with c in b's place, a c, and d
        (1, [1, 4, 6, 2, 3, 7, 5]),  # one session after the other
    ],
)
def test_a_closed_loop_asks_for_each_session_in_turn(
    at_once: int, order: list[int], tmp_path: Path
) -> None:
    workload = Workload(kind="trace", file=trace(tmp_path, LINES), loop="closed", at_once=at_once)
    assert [request.hash_ids[0] for request in workload.trace(0).requests] == order


def test_an_open_loop_is_the_order_of_the_file(tmp_path: Path) -> None:
    workload = Workload(kind="trace", file=trace(tmp_path, LINES))
    assert [request.hash_ids[0] for request in workload.trace(0).requests] == list(range(1, 8))


@pytest.mark.parametrize(
    ("session", "problem"), [(None, "line 2: has no session_id"), (1.5, "line 2: session_id: Exp")]
)
def test_a_closed_loop_needs_sessions(session: object, problem: str, tmp_path: Path) -> None:
    path = trace(tmp_path, [("a", 1), (session, 2)])
    with pytest.raises(SettingsError, match=problem):
        Workload(kind="trace", file=path, loop="closed").trace(0)


def test_a_closed_loop_of_agents_has_the_same_requests_in_another_order() -> None:
    sizes = {"kind": "agent", "sessions": 5, "turns": 4}
    opened = Workload(**sizes).trace(3).requests
    closed = Workload(**sizes, loop="closed").trace(3).requests
    assert opened != closed
    assert sorted(r.hash_ids for r in opened) == sorted(r.hash_ids for r in closed)


def sharegpt(folder: Path, *talks: list[tuple[str, str]]) -> str:
    path = folder / "sharegpt.json"
    told = [
        {"id": f"c{n}", "conversations": [{"from": who, "value": what} for who, what in talk]}
        for n, talk in enumerate(talks)
    ]
    path.write_text(json.dumps(told))
    return str(path)


def asked(path: str, **sizes: object) -> list[Request]:
    return Workload(kind="sharegpt", file=path, **sizes).trace(0).requests


def test_a_conversation_is_a_session_of_growing_prompts(tmp_path: Path) -> None:
    """Roles and line ends count too, 4 characters are a token.

    Before the first answer "human" + 4,096 + 2 line ends are 4,103 characters: 1,025 tokens.
    Then come "gpt" + 401 + 2 and "human" + 2,048 + 2: 6,564, 1,641 tokens, 3 blocks.
    """
    talk = [("human", "a" * 4_096), ("gpt", "b" * 401), ("human", "c" * 2_048), ("gpt", "d")]
    first, second = asked(sharegpt(tmp_path, talk))
    assert (first.input_length, first.output_length, len(first.hash_ids)) == (1_025, 101, 2)
    assert (second.input_length, second.output_length, len(second.hash_ids)) == (1_641, 1, 3)
    assert second.hash_ids[:2] == first.hash_ids
    assert len(set(second.hash_ids)) == 3


def test_conversations_share_blocks_as_far_as_their_texts_agree(tmp_path: Path) -> None:
    system = ("system", "s" * 3_000)
    talks = [[system, ("human", letter * 3_000), ("gpt", "x")] for letter in "ab"]
    request, other = asked(sharegpt(tmp_path, *talks))
    agree = [a == b for a, b in zip(request.hash_ids, other.hash_ids, strict=True)]
    assert agree == [True, False]  # 6,016 characters; the 3,008th is the first that differs


def test_what_has_no_whole_block_and_no_question_is_left_out(tmp_path: Path) -> None:
    short = [("human", "hi"), ("gpt", "hello")]
    answered_first = [("gpt", "x" * 5_000), ("human", "why?"), ("assistant", "so")]
    only_asked = [("human", "x" * 5_000)]
    requests = asked(sharegpt(tmp_path, short, answered_first, only_asked, []))
    assert [r.input_length for r in requests] == [(4 + 5_001 + 6 + 5) // 4]


def test_each_seed_draws_conversations_and_interleaves_them(tmp_path: Path) -> None:
    talks = [
        [(who, f"{n}{turn}" + "x" * 2_500) for turn in range(4) for who in ("human", "gpt")]
        for n in range(20)
    ]
    path = sharegpt(tmp_path, *talks)
    workload = Workload(kind="sharegpt", file=path, sessions=6)
    assert workload.seeded
    drawn = {seed: workload.trace(seed).requests for seed in range(4)}
    assert drawn[0] == workload.trace(0).requests
    assert all(len(requests) == 24 for requests in drawn.values())
    assert len({tuple(r.hash_ids[0] for r in requests) for requests in drawn.values()}) == 4
    for requests in drawn.values():
        by_talk: dict[int, list[int]] = {}
        for request in requests:
            by_talk.setdefault(request.hash_ids[0], []).append(request.input_length)
        assert all(lengths == sorted(set(lengths)) for lengths in by_talk.values())
        firsts = [request.hash_ids[0] for request in requests]
        assert firsts != sorted(firsts, key=firsts.index)  # interleaved
    closed = Workload(kind="sharegpt", file=path, sessions=6, loop="closed", at_once=1).trace(0)
    firsts = [request.hash_ids[0] for request in closed.requests]
    assert firsts == sorted(firsts, key=firsts.index)  # one after the other
    assert len(asked(path, sessions=500)) == 80


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[{"conversations": [', "is not JSON"),
        ("\ud800", "is not JSON"),
        ("[[]]", "is no list of conversations as ShareGPT has: Expected `object`, got `array`"),
        ('{"a": 1}', "is no list of conversations as ShareGPT has: Expected `array`, got `object`"),
        ('[{"id": "a"}]', "missing required field `conversations` - at `$[0]`"),
        ('[{"conversations": [{"from": "gpt", "value": 3}]}]', "got `int` - at `$[0].conversat"),
        ("[]", "has no conversation with a prompt of a whole block"),
    ],
)
def test_a_bad_file_of_conversations_is_one_line(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(SettingsError) as raised:
        asked(str(path))
    assert str(raised.value).startswith(f"{path}: ")
    assert problem in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        ({}, "kind sharegpt needs a file"),
        ({"file": ""}, "kind sharegpt needs a file"),
        ({"file": "-"}, "file is -: a workload is read more than once: name a file"),
        ({"file": "x", "sessions": 0}, "sessions is 0: give at least 1"),
        ({"file": "x", "turns": 3}, "turns is no setting of sharegpt"),
    ],
)
def test_sizes_of_conversations_are_checked(sizes: dict[str, object], problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        Workload(kind="sharegpt", **sizes)


@pytest.mark.parametrize("name", ["missing.json", ".", "a\0b"])
def test_a_file_of_conversations_that_cannot_be_read(name: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        asked(f"{tmp_path}/{name}")
