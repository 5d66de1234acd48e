"""The driver `server` against a small real server: what is asked, when, and what is measured."""

import asyncio
import json
import selectors
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from statecache.ab.drivers import server_process
from statecache.ab.drivers.base import ArmError
from statecache.ab.drivers.block_tokens import BlockTokens
from statecache.ab.drivers.server import Server
from statecache.ab.drivers.server_load import at_their_times
from statecache.ab.drivers.server_model import vocabulary_of
from statecache.ab.drivers.server_process import ServerProcess
from statecache.ab.server_arm import ServerArm, ServerSettings
from statecache.ab.server_results import Answers
from statecache.ab.workloads import Workload
from statecache.errors import SettingsError
from support.ab_servers import server_run
from support.stand_in_server import VOCABULARY, StandIn, standing_in
from support.waiting import wait_until

# Session, milliseconds, blocks, tokens of the answer.
Line = tuple[str, int, list[int], int]
TOKENS_A_BLOCK = 8
SHORT = [("a", 0, [1], 1)]


def workload(folder: Path, lines: list[Line], **loop: object) -> Workload:
    path = folder / "t.jsonl"
    path.write_text(
        "".join(
            json.dumps(
                {
                    "session_id": session,
                    "timestamp": at,
                    "input_length": 512 * len(blocks) + 100,  # no whole block more
                    "output_length": output,
                    "hash_ids": [*blocks, 99],
                }
            )
            + "\n"
            for session, at, blocks, output in lines
        )
    )
    return Workload(kind="trace", file=str(path), **loop)


def play(
    server: StandIn, asked: Workload, seed: int = 0, longest: int = 100, **settings: float
) -> Answers:
    """Play on a server that was attached to; its first two requests are not of the workload."""
    arm = ServerArm(name="a", url=server.url, vocabulary=VOCABULARY)
    asking = ServerSettings(tokens_a_block=TOKENS_A_BLOCK, salt=1)
    with closing(Server(arm, asking, Path("none"), "0")) as driver:
        driver.start(longest)
        driver._settings = msgspec.structs.replace(asking, **settings)
        return driver.play(asked, asked.asked(seed), seed)


def blocks_of(server: StandIn, seed: int = 0) -> list[int]:
    """The first block of each prompt that was asked, by its tokens."""
    tokens = BlockTokens(f"1 0 seed {seed}", VOCABULARY, TOKENS_A_BLOCK)
    names = {tuple(tokens.prompt([block])): block for block in range(100)}
    return [names[tuple(prompt[:TOKENS_A_BLOCK])] for prompt in server.prompts[2:]]


def test_equal_prefixes_have_equal_tokens_and_another_salt_has_others() -> None:
    tokens, again, other = (BlockTokens(salt, 800, 8) for salt in ("x", "x", "y"))
    prompt = tokens.prompt([5, 7, -1])
    assert prompt[:16] == again.prompt([5, 7])
    assert prompt[8:16] == again.prompt([7]) != prompt[:8]
    assert prompt[:8] not in (other.prompt([5]), other.prompt([7]))
    many = BlockTokens("x", 800, 5_000).prompt([1])
    assert (min(many), max(many)) == (100, 699)  # an eighth of 800 is left at each end


def test_hits_are_those_the_server_reports(tmp_path: Path) -> None:
    """Blocks of 8 tokens here, of 4 there: 0 + 16 + (24 less the last block) + 0 of 72 tokens."""
    lines: list[Line] = [("s", 0, prompt, 1) for prompt in ([1, 2], [1, 2, 3], [1, 2, 3], [4])]
    with standing_in() as server:
        answers = play(server, workload(tmp_path, lines, loop="closed"))
    assert [answer.cached_tokens for answer in answers.answered] == [0, 16, 20, 0]
    assert [answer.prompt_tokens for answer in answers.answered] == [16, 24, 24, 8]
    run = server_run("c", "a", 0, answers, 0)
    assert (run.hit_tokens, run.prompt_tokens, run.missed_by_state_tokens) == (36, 72, None)


@pytest.mark.parametrize("mode", ["secret", "silent"])
def test_hits_that_are_not_reported_are_not_zero(mode: str, tmp_path: Path) -> None:
    with standing_in(mode) as server:
        answers = play(server, workload(tmp_path, SHORT * 2, loop="closed"))
    run = server_run("c", "a", 0, answers, 0)
    assert (run.requests, run.hit_tokens) == (2, None)


def test_another_seed_finds_nothing_of_the_seed_before(tmp_path: Path) -> None:
    asked = workload(tmp_path, [("s", 0, [1, 2], 1)] * 2, loop="closed")
    with standing_in() as server:
        found = [play(server, asked, seed) for seed in (0, 1)]
    assert [[answer.cached_tokens for answer in answers.answered] for answers in found] == [
        [0, 12]
    ] * 2


def test_times_are_those_of_the_server(tmp_path: Path) -> None:
    """30 ms to the first token and 20 ms to each of two more, at least."""
    start = time.perf_counter()
    with standing_in(first_ms=30, between_ms=20) as server:
        answers = play(server, workload(tmp_path, [("a", 0, [1], 3)], loop="closed"))
    (answer,) = answers.answered
    (first, _), _, (last, tokens) = answer.pieces
    assert tokens == 1
    assert 0.030 <= first <= last
    assert 0.070 <= last <= answer.ended_at - answer.asked_at <= time.perf_counter() - start
    assert sum(answer.gaps) == pytest.approx(last - first)
    (record,) = answers.rows()
    assert (record["ttft_ms"], record["output_tokens"]) == (round(1000 * first, 3), 3)
    assert len(record["itl_ms"]) == 2


def test_tokens_that_come_together_share_their_time(tmp_path: Path) -> None:
    """The first of five alone, then two and two."""
    start = time.perf_counter()
    with standing_in("lumps", between_ms=20) as server:
        answers = play(server, workload(tmp_path, [("a", 0, [1], 5)], loop="closed"))
    (answer,) = answers.answered
    assert [tokens for _, tokens in answer.pieces] == [1, 2, 2]
    (first, _), (second, _), (third, _) = answer.pieces
    halves = [(second - first) / 2] * 2 + [(third - second) / 2] * 2
    assert answer.gaps == pytest.approx(halves)
    assert 0.08 <= third <= time.perf_counter() - start


def test_without_a_word_of_the_server_a_piece_is_a_token(tmp_path: Path) -> None:
    """Three tokens and a last piece that says why it ended: with usage at the end it is none."""
    found = {}
    for mode in ("secret", "silent"):
        with standing_in(mode) as server:
            answers = play(server, workload(tmp_path, [("a", 0, [1], 3)], loop="closed"))
        (answer,) = answers.answered
        found[mode] = (answer.output_tokens, [tokens for _, tokens in answer.pieces])
    assert found == {"secret": (3, [1, 1, 1]), "silent": (4, [1, 1, 1, 1])}


def test_answers_are_as_long_as_the_workload_says_within_bounds(tmp_path: Path) -> None:
    lines: list[Line] = [("a", 0, [1], output) for output in (0, 3, 50)]
    with standing_in() as server:
        answers = play(server, workload(tmp_path, lines, loop="closed"), output_tokens=5)
    assert server.outputs[2:] == [1, 3, 5]
    assert [answer.output_tokens for answer in answers.answered] == [1, 3, 5]


def test_a_closed_loop_has_so_many_sessions_at_once_and_keeps_their_order(tmp_path: Path) -> None:
    """Sessions a, b, c and d; one by one the order is that of the other drivers."""
    lines: list[Line] = [
        (session, 0, [block], 1) for block, session in enumerate("abcadac", start=1)
    ]
    with standing_in(first_ms=20, together=2) as server:
        play(server, workload(tmp_path, lines, loop="closed", at_once=2))
        assert server.most_at_once == 2
        order = blocks_of(server)
        assert sorted(order) == list(range(1, 8))
        assert set(order[:2]) == {1, 2}
        assert order.index(1) < order.index(4) < order.index(6)
        assert order.index(3) < order.index(7)
    with standing_in() as server:
        one_by_one = workload(tmp_path, lines, loop="closed", at_once=1)
        play(server, one_by_one)
        assert server.most_at_once == 1
        assert blocks_of(server) == [1, 4, 6, 2, 3, 7, 5]
        assert blocks_of(server) == [
            request.hash_ids[0] for request in one_by_one.trace(0).requests
        ]
    with standing_in(first_ms=20, together=4) as server:
        play(server, workload(tmp_path, lines, loop="closed"))
        assert server.most_at_once == 4


OPEN = (1000, 3000, 7000)  # at ten times the speed after 0, 0.2 and 0.6 s


def test_an_open_loop_asks_without_an_answer_before(tmp_path: Path) -> None:
    """None is answered before all three are there."""
    lines: list[Line] = [("a", at, [at // 1000], 1) for at in OPEN]
    with standing_in(together=3) as server:
        answers = play(server, workload(tmp_path, lines), speed=10)
        assert server.most_at_once == 3
        assert sorted(blocks_of(server)) == [1, 3, 7]
    for answer, due in zip(answers.answered, (0, 0.2, 0.6), strict=True):
        assert due <= answer.asked_at


class TimelessLoop(asyncio.SelectorEventLoop):
    """An event loop that does not sleep: its time jumps to what it waits for."""

    def __init__(self) -> None:
        loop = self

        class Selector(selectors.SelectSelector):
            def select(self, timeout: float | None = None) -> Any:
                loop.now += timeout or 0
                return super().select(0)

        self.now = 0.0
        super().__init__(Selector())

    def time(self) -> float:
        return self.now


def test_an_open_loop_asks_at_its_times(tmp_path: Path) -> None:
    """Each answer takes 2 s."""
    lines: list[Line] = [("a", at, [at // 1000], 1) for at in OPEN]
    asked = workload(tmp_path, lines).asked(0)
    with closing(TimelessLoop()) as loop:
        begun: list[tuple[int, float]] = []

        async def ask(number: int) -> None:
            begun.append((number, loop.time()))
            await asyncio.sleep(2)

        loop.run_until_complete(at_their_times(asked, 10, ask))
        assert begun == [(0, 0), (1, pytest.approx(0.2)), (2, pytest.approx(0.6))]
        assert loop.time() == pytest.approx(2.6)


@pytest.mark.parametrize(
    ("mode", "problem"),
    [
        ("fails", 'request 9 failed: status 500: {"error": "out of luck"}'),
        ("hangs", "request 9 failed: no answer within 0.2 s"),
        ("refuses", "request 9 failed: error in the stream: {'message': 'no room'}"),
        ("breaks", "request 9 failed: RemoteProtocolError: peer closed"),
        ("long", "request 9 failed: LineTooLongError: a line has more than 4194304 bytes"),
        ("deep", "request 9 failed: RecursionError"),
    ],
)
def test_ten_errors_in_a_row_end_an_arm(mode: str, problem: str, tmp_path: Path) -> None:
    lines: list[Line] = [("a", 0, [block], 2) for block in range(1000)]
    seconds = 0.2 if mode == "hangs" else 600
    with standing_in(mode) as server:
        with pytest.raises(ArmError) as caught:
            play(server, workload(tmp_path, lines, loop="closed"), request_seconds=seconds)
        assert str(caught.value).startswith(problem)
        # One that was given up at once may not have arrived.
        assert len(server.prompts) == 2 + 10 or mode == "hangs"


def test_a_few_errors_are_counted_and_the_rest_is_measured(tmp_path: Path) -> None:
    """Each third request fails; after a warm-up of one there are 8, of which 3 fail."""
    lines: list[Line] = [("a", 0, [block], 1) for block in range(9)]
    with standing_in("moody") as server:
        answers = play(server, workload(tmp_path, lines, loop="closed"))
    assert [answer.error is None for answer in answers.answered] == [True, True, False] * 3
    run = server_run("c", "a", 0, answers, 1)
    assert (run.warm_up, run.requests, run.rejected, run.prompt_tokens) == (1, 5, 3, 40)
    assert run.times is not None
    assert run.times.request_errors == 3 / 8
    assert [record["ttft_ms"] is None for record in answers.rows()] == [False, False, True] * 3


def test_a_server_without_room_for_the_workload_is_refused_before() -> None:
    """The stand-in takes 2,000 tokens."""
    with standing_in() as server, pytest.raises(SettingsError, match="take up to 2001 tokens with"):
        play(server, Workload(), longest=2001)


def test_the_end_of_a_server_is_that_of_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are deaf to SIGTERM."""
    monkeypatch.setattr(server_process, "_END_SECONDS", 0.3)
    script = tmp_path / "server"
    script.write_text(
        "#!/bin/bash\ntrap '' TERM; sleep 1000 &\n"
        "echo $! $$ > part; echo said; mv part pids; wait\n"
    )
    script.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    process = ServerProcess(ServerArm(name="a", command=f"{script} {{port}}"), Path("log"))
    wait_until(Path("pids").exists)
    assert process.alive
    assert process.fate() == "log: said"
    process.close()
    assert process.fate() == "the server ended with status -9; log: said"
    for pid in Path("pids").read_text().split():
        wait_until(lambda pid=pid: not _runs(pid))


def _runs(pid: str) -> bool:
    """Whether it is there and no zombie, which only waits to be looked at."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_vocabulary_is_found_in_the_model_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 777}, "other": [1]}')
    assert vocabulary_of(str(tmp_path)) == 777
    assert vocabulary_of(str(tmp_path / "none")) is None


def test_a_vocabulary_is_found_in_the_cache_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    folder = tmp_path / "hub" / "models--some--model" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"vocab_size": 888}')
    assert vocabulary_of("some/model") == 888


def test_what_is_shown_of_an_arm_has_no_keys() -> None:
    arm = ServerArm(
        name="a",
        url="http://me:secret@host:1/v1",
        command="serve --api-key secret --hf-token=secret --max-tokens 5 --tokenizer t {port}",
    ).without_keys()
    assert arm.url == "http://***@host:1/v1"
    assert arm.command == ("serve --api-key *** --hf-token=*** --max-tokens 5 --tokenizer t {port}")
    attached = ServerArm(name="a", url="http://host:1")
    assert attached.without_keys() == attached
