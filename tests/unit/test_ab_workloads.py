"""The order in which a workload asks."""

import json
from pathlib import Path

import pytest

from statecache.ab.workloads import Workload
from statecache.errors import SettingsError

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
