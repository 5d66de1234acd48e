"""Public traces become the project's, worked by hand on small ones of the same formats."""

import gzip
import io
import json
from pathlib import Path

import pytest

from statecache.errors import TraceError
from statecache.trace import convert
from statecache.trace.convert import trace_lines
from statecache.trace.format import read_trace
from support.trace_sources import conversation, request, subagent, write_folder

# Of 3, 4 and 4 blocks; at its third request the second block of the system prompt is another.
GROWING = [
    request(0, 1_600, [1, 2, 3, 4, 5, 6], api_time=4, think_time=0),
    request(100, 2_100, [1, 2, 3, 4, 5, 6, 7, 8], api_time=5.5, think_time=96),
    request(110, 2_048, [1, 2, 9, 10, 11, 12, 13, 14], api_time=1, think_time=4.5),
]


def converted(source: Path | str, **options: object) -> list[dict]:
    return [json.loads(line) for line in trace_lines(str(source), **options)]


def times(requests: list[dict]) -> list[int]:
    return [found["timestamp"] for found in requests]


def ids(requests: list[dict]) -> list[list[int]]:
    return [found["hash_ids"] for found in requests]


def write(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_a_conversation_keeps_its_pace_but_for_long_thinking(tmp_path: Path) -> None:
    # 100 s to the second request, of which 96 s were thought: 36 too many. Then 10 s.
    found = converted(write(tmp_path / "trace_0001.json", conversation(GROWING)))
    assert times(found) == [0, 64_000, 74_000]
    assert [(r["input_length"], r["output_length"]) for r in found] == [
        (1_600, 10),
        (2_100, 10),
        (2_048, 10),
    ]
    assert ids(found) == [[0, 1, 2], [0, 1, 2, 3], [0, 4, 5, 6]]
    assert {r["session_id"] for r in found} == {"conv-0000"}


def test_as_published_thinking_comes_after_and_the_system_prompt_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 4 s of serving and 0 of thinking, then 5.5 and 60 of 96.
    monkeypatch.setattr(convert, "PUBLISHED", convert.Published(conversations=1))
    folder = write_folder(tmp_path / "traces", conversation(GROWING))
    found = converted(folder, published=True)
    assert times(found) == [0, 4_000, 69_500]
    assert ids(found) == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 4, 5]]


def test_conversations_begin_in_turns_and_share_equal_tools_and_system_prompts(
    tmp_path: Path,
) -> None:
    first = conversation([request(0, 1_600, [1, 2, 3, 4, 5, 6])])
    other = conversation([request(0, 1_600, [1, 2, 3, 4, 5, 6])], tools=500, system=600)
    found = converted(write_folder(tmp_path / "traces", first, other, first))
    assert times(found) == [0, 37_000, 74_000]
    assert ids(found) == [[0, 1, 2], [3, 4, 5], [0, 1, 6]]
    assert [r["session_id"] for r in found] == ["conv-0000", "conv-0001", "conv-0002"]


def test_all_conversations_begin_within_half_an_hour(tmp_path: Path) -> None:
    talk = conversation([request(0, 512, [1, 2])])
    found = converted(write_folder(tmp_path / "traces", *[talk] * 50))
    assert max(times(found)) == 48 * 37_000
    # The fiftieth would begin 1,813 s after the first: it begins at 13 s, second of all.
    assert [r["session_id"] for r in found[:3]] == ["conv-0000", "conv-0049", "conv-0001"]


def test_what_is_not_timed_follows_as_recorded(tmp_path: Path) -> None:
    talk = [
        request(5, 512, [1, 2]),
        request(45, 512, [1, 2], api_time=10),  # 40 s later, all of it thinking
        request(145, 512, [1, 2]),  # 10 s of serving, and 90 of thinking
        request(140, 512, [1, 2], api_time=None, think_time=None),  # its clock went back
    ]
    assert times(converted(write(tmp_path / "x", conversation(talk)))) == [
        0,
        40_000,
        110_000,
        110_000,
    ]


def test_sub_agents_run_side_by_side_and_are_waited_for(tmp_path: Path) -> None:
    talk = [
        request(0, 1_600, [1, 2, 3, 4, 5, 6], api_time=4, think_time=0),
        subagent(90, [request(0, 512, [7, 8], api_time=2), request(80, 512, [7, 8], api_time=30)]),
        subagent(20, [request(0, 1_024, [1, 2, 7, 8], api_time=3)]),
        request(110, 2_100, [1, 2, 3, 4, 5, 6, 7, 8], api_time=5, think_time=106),
        request(120, 2_100, [1, 2, 3, 4, 5, 6, 7, 8], api_time=5, think_time=5),
    ]
    found = converted(write(tmp_path / "x", conversation(talk)))
    # Both begin at 4 s. The first thinks for 78 s, cut to 60, and ends 30 s after that, at 96 s:
    # only then does the conversation go on, which would have thought for 60 s alone.
    assert [(r["timestamp"], r["session_id"]) for r in found] == [
        (0, "conv-0000"),
        (4_000, "conv-0000-agent-1"),
        (4_000, "conv-0000-agent-2"),
        (66_000, "conv-0000-agent-1"),
        (96_000, "conv-0000"),
        (106_000, "conv-0000"),
    ]
    # The block of 7 and 8 is the same one; a conversation tells blocks apart by their ids alone.
    assert ids(found)[1:4] == [[3], [0, 3], [3]]
    assert ids(found)[4] == [0, 1, 2, 3]


def test_sub_agents_share_their_own_system_prompts(tmp_path: Path) -> None:
    agent = subagent(9, [request(0, 1_536, [31, 32, 33, 34, 35, 36])], tools=800, system=300)
    talk = conversation([request(0, 512, [1, 2]), agent], tools=0, system=0)
    found = converted(write_folder(tmp_path / "traces", talk, talk))
    assert ids(found) == [[0], [1, 2, 3], [4], [1, 2, 5]]


def test_global_ids_mean_the_same_in_every_file(tmp_path: Path) -> None:
    here = conversation([request(0, 1_024, [1, 2, 3, 4])], hash_id_scope="global")
    other = conversation(
        [request(0, 1_024, [1, 2, 5, 6])], tools=0, system=0, hash_id_scope="global"
    )
    first, second = ids(converted(write_folder(tmp_path / "traces", here, other)))
    assert first[0] == second[0]
    assert len({*first, *second}) == 3


def test_published_conversations_are_the_first_small_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talks = [conversation([request(0, 512 * n, [*range(2 * n)])]) for n in (1, 40, 2, 3, 4)]
    folder = write_folder(tmp_path / "traces", *talks)
    (folder / "README.md").write_text("of another kind")
    size = (folder / "trace_0002.json").stat().st_size
    monkeypatch.setattr(convert, "PUBLISHED", convert.Published(conversations=3, file_bytes=size))
    assert [r["input_length"] for r in converted(folder, published=True)] == [512, 1_024, 1_536]
    assert len(converted(folder)) == 5
    monkeypatch.setattr(convert, "PUBLISHED", convert.Published(conversations=5, file_bytes=size))
    problem = rf"traces: has 4 conversations of under {size:,} bytes, the published tables need 5"
    with pytest.raises(TraceError, match=problem):
        converted(folder, published=True)


MOONCAKE = [
    {"timestamp": 7, "input_length": 1_100, "output_length": 5, "hash_ids": [4, 5, 6]},
    {"timestamp": 3, "input_length": 600, "output_length": 6, "hash_ids": [4, 9], "more": "x"},
    {"timestamp": 7, "input_length": 100, "output_length": 7, "hash_ids": [8]},
    {"timestamp": 7.5, "input_length": 512, "output_length": 0, "hash_ids": [-4]},
]


def mooncake(requests: list[dict]) -> bytes:
    return b"".join(json.dumps(r).encode() + b"\n" for r in requests)


def test_mooncake_stays_as_it_is_but_sorted_and_without_other_fields(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(mooncake(MOONCAKE))
    first, second, third, fourth = MOONCAKE
    second = {name: value for name, value in second.items() if name != "more"}
    assert converted(tmp_path / "x.jsonl") == [second, first, third, fourth]


def test_published_requests_are_the_first_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.jsonl").write_bytes(mooncake(MOONCAKE))
    monkeypatch.setattr(convert, "PUBLISHED", convert.Published(requests=1))
    assert converted(tmp_path / "x.jsonl", published=True) == MOONCAKE[:1]
    monkeypatch.setattr(convert, "PUBLISHED", convert.Published(requests=5))
    with pytest.raises(TraceError, match="has 4 requests, the published tables need 5"):
        converted(tmp_path / "x.jsonl", published=True)


def test_a_converted_trace_is_converted_to_itself(tmp_path: Path) -> None:
    lines = [*trace_lines(str(write(tmp_path / "x", conversation(GROWING))))]
    (tmp_path / "trace").write_bytes(b"".join(lines))
    assert [*trace_lines(str(tmp_path / "trace"))] == lines
    assert len(read_trace(str(tmp_path / "trace")).requests) == 3


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("indent", [None, 2])
def test_the_format_is_told_by_the_content(indent: int | None, packed: bool) -> None:
    def told(content: bytes, source_format: str = "auto") -> list[dict]:
        stdin = io.BytesIO(gzip.compress(content) if packed else content)
        return converted("-", source_format=source_format, stdin=stdin)

    talk = json.dumps(conversation(GROWING), indent=indent).encode()
    assert len(told(talk)) == 3
    assert told(talk) == told(talk, "kv-cache-tester")
    assert len(told(mooncake(MOONCAKE))) == 4
    assert told(mooncake(MOONCAKE)) == told(mooncake(MOONCAKE), "mooncake")
    single = json.dumps(MOONCAKE[0], indent=indent).encode()
    assert told(single) == MOONCAKE[:1]


def test_packed_conversations_of_a_folder_are_read(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "traces", conversation(GROWING))
    plain = converted(folder)
    path = folder / "trace_0001.json"
    path.with_name("trace_0001.json.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    assert converted(folder) == plain


def test_requests_without_a_whole_block_are_kept_beside_others(tmp_path: Path) -> None:
    talk = [request(0, 100, []), request(1, 512, [1, 2])]
    assert ids(converted(write(tmp_path / "x", conversation(talk)))) == [[], [0]]
