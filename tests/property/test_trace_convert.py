"""Conversion of any conversations: prompts share blocks exactly as far as their ids say."""

import json
from itertools import combinations, product
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from statecache.trace.convert import trace_lines
from statecache.trace.format import read_trace
from support.trace_sources import conversation, request, write_folder

SECONDS = st.none() | st.floats(0, 200)


@st.composite
def conversations(draw: st.DrawFn) -> dict:
    """Prompts that go on from a cut of an earlier one; an id stands for all that is before it."""
    per_block = draw(st.sampled_from([1, 2, 4]))
    prompts: list[list[int]] = [[]]
    talk = []
    for number in range(draw(st.integers(1, 8))):
        base = prompts[draw(st.integers(0, len(prompts) - 1))]
        kept = base[: draw(st.integers(0, len(base)))]
        fresh = [1 + 100 * number + n for n in range(draw(st.integers(0, 12)))]
        prompts.append(kept + fresh)
        size = 512 // per_block
        tokens = size * len(prompts[-1]) + draw(st.integers(0, size - 1))
        pace = {"api_time": draw(SECONDS), "think_time": draw(SECONDS)}
        talk.append(request(draw(st.floats(0, 1_000)), tokens, prompts[-1], **pace))
    talk.append(request(1_000, 512, [*range(-per_block, 0)]))  # one prompt of a whole block
    tools, system = draw(st.sampled_from([(0, 0), (500, 100), (100, 500), (1_200, 0)]))
    return conversation(talk, tools, system, block_size=512 // per_block)


def shared(first: list[int], second: list[int]) -> int:
    pairs = zip(first, second, strict=False)
    shorter = min(len(first), len(second))
    return next((n for n, (a, b) in enumerate(pairs) if a != b), shorter)


def converted(talks: list[dict]) -> list[dict]:
    with TemporaryDirectory() as folder:
        source = write_folder(Path(folder) / "traces", *talks)
        lines = [*trace_lines(str(source))]
        (Path(folder) / "out").write_bytes(b"".join(lines))
        read_trace(str(Path(folder) / "out"))
    return [json.loads(line) for line in lines]


def assert_shared_as_told(talk: dict, found: list[dict]) -> None:
    """Assert it of all pairs of requests of a conversation."""
    per_block = 512 // talk["block_size"]
    assert [r["input_length"] for r in found] == [r["in"] for r in talk["requests"]]
    assert [len(r["hash_ids"]) for r in found] == [r["in"] // 512 for r in talk["requests"]]
    pairs = list(zip(found, talk["requests"], strict=True))
    for (first, first_told), (second, second_told) in product(pairs, pairs):
        told = shared(first_told["hash_ids"], second_told["hash_ids"]) // per_block
        whole = min(first_told["in"], second_told["in"]) // 512
        assert shared(first["hash_ids"], second["hash_ids"]) == min(told, whole)


def assert_tools_alone_are_shared(
    first: dict, first_found: list[dict], second: dict, second_found: list[dict]
) -> None:
    """Assert it of all pairs of requests of two conversations."""
    tokens = [(talk["tool_tokens"], talk["system_tokens"]) for talk in (first, second)]
    most = sum(tokens[0]) // 512 if tokens[0] == tokens[1] else 0
    for here, there in product(first_found, second_found):
        assert shared(here["hash_ids"], there["hash_ids"]) <= most


def test_blocks_are_shared_as_far_as_the_ids_agree(share: float) -> None:
    @settings(deadline=None, max_examples=int(300 * share), derandomize=True)
    @given(st.lists(conversations(), min_size=1, max_size=3))
    def holds(talks: list[dict]) -> None:
        found = converted(talks)
        times = [r["timestamp"] for r in found]
        assert times == sorted(times)
        names = [f"conv-{number:04}" for number in range(len(talks))]
        by_talk = [[r for r in found if r["session_id"] == name] for name in names]
        assert sum(map(len, by_talk)) == len(found)
        for talk, own in zip(talks, by_talk, strict=True):
            assert_shared_as_told(talk, own)
        for first, second in combinations(zip(talks, by_talk, strict=True), 2):
            assert_tools_alone_are_shared(*first, *second)

    holds()
