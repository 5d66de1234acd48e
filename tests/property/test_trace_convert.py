"""Conversion of any conversations: prompts share blocks exactly as far as their ids say."""

import json
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


def shared(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def test_blocks_are_shared_as_far_as_the_ids_agree(share: float) -> None:
    @settings(deadline=None, max_examples=int(300 * share), derandomize=True)
    @given(st.lists(conversations(), min_size=1, max_size=3))
    def holds(talks: list[dict]) -> None:
        with TemporaryDirectory() as folder:
            source = write_folder(Path(folder) / "traces", *talks)
            lines = [*trace_lines(str(source))]
            (Path(folder) / "out").write_bytes(b"".join(lines))
            read_trace(str(Path(folder) / "out"))
        found = [json.loads(line) for line in lines]
        assert [r["timestamp"] for r in found] == sorted(r["timestamp"] for r in found)
        assert len(found) == sum(len(talk["requests"]) for talk in talks)
        for number, talk in enumerate(talks):
            own = [r for r in found if r["session_id"] == f"conv-{number:04}"]
            assert [r["input_length"] for r in own] == [r["in"] for r in talk["requests"]]
            per_block = 512 // talk["block_size"]
            for one, raw in zip(own, talk["requests"], strict=True):
                assert len(one["hash_ids"]) == raw["in"] // 512
                for other, other_raw in zip(own, talk["requests"], strict=True):
                    told = shared(raw["hash_ids"], other_raw["hash_ids"]) // per_block
                    most = min(raw["in"], other_raw["in"]) // 512
                    assert shared(one["hash_ids"], other["hash_ids"]) == min(told, most)
        for one in found:
            for other in found:
                if one["session_id"] != other["session_id"]:
                    prompts = [talks[int(r["session_id"][5:])] for r in (one, other)]
                    tools = [(talk["tool_tokens"], talk["system_tokens"]) for talk in prompts]
                    most = sum(tools[0]) // 512 if tools[0] == tools[1] else 0
                    assert shared(one["hash_ids"], other["hash_ids"]) <= most

    holds()
