"""A real SGLang server that drafts with MTP: the tokens of SGLang without drafter or plugin.

The kernels of a verify step are stand-ins (standins/drafting.py); scheduler, workers, pools and
draft model are SGLang's own. The head is right one time in four, so drafts are accepted and
rejected anywhere, of single requests and of several at once, and answers end inside a run.
"""

from pathlib import Path

import pytest
from server import Server, running
from test_server import CONFIGURATIONS, in_parallel
from tiny_model import make_tiny_model

from support.exposition import wait_for
from support.mtp_head import add_drafter

DRAFTS = 3
DRAFTER = (
    *("--speculative-algorithm", "NEXTN"),
    *("--speculative-num-steps", str(DRAFTS)),
    *("--speculative-eagle-topk", "1"),
    *("--speculative-num-draft-tokens", str(DRAFTS + 1)),
)
CHATS, TURNS = 8, 3


def converse(server: Server) -> list[dict]:
    """Three turns of eight chats, the last four of them at once; answers of four to 29 tokens."""
    answers: dict[tuple[int, int], dict] = {}
    prompts = [
        [4 + (7 * i + 31 * chat) % 250 for i in range(20 + 9 * chat)] for chat in range(CHATS)
    ]

    def turn(chat: int, number: int) -> None:
        found = server.generate(prompts[chat], new=4 + 3 * chat + 2 * number)
        answers[chat, number] = found
        prompts[chat] += [*found["tokens"], *(4 + (i * 11 + chat) % 250 for i in range(5 + chat))]

    for number in range(TURNS):
        for chat in range(4):
            turn(chat, number)
        in_parallel([(turn, (chat, number)) for chat in range(4, CHATS)])
    return [answers[asked] for asked in sorted(answers)]


def ask(forked: dict, model: Path, log: Path, *flags: str) -> dict:
    with running(model, log, *flags, **forked) as server:
        answers = converse(server)
        metrics = {}
        if "--enable-metrics" in flags:
            metrics = wait_for(
                f"http://127.0.0.1:{server.port}",
                lambda seen: seen["requests_total", ""] == CHATS * TURNS,
            )
    return {"answers": answers, "metrics": metrics}


@pytest.fixture(scope="module")
def arms(tmp_path_factory, forked) -> tuple[dict, dict]:
    """SGLang alone without a drafter; with the plugin and with one."""
    folder = tmp_path_factory.mktemp("drafting")
    tiny = make_tiny_model(tmp_path_factory.mktemp("tiny-qwen3-next-mtp"), spread=0.1)
    model = add_drafter(tiny, noise=4.0)
    led = (*CONFIGURATIONS["gds"], "--enable-metrics", *DRAFTER)
    alone = ask(forked, model, folder / "off.log")
    return alone, ask(forked, model, folder / "drafting.log", *led)


def test_the_tokens_are_those_without_drafter_and_plugin(arms):
    alone, ours = (arm["answers"] for arm in arms)
    assert [a["tokens"] for a in ours] == [a["tokens"] for a in alone]
    gaps = [
        abs(a - b)
        for x, y in zip(alone, ours, strict=True)
        for a, b in zip(x["logprobs"], y["logprobs"], strict=True)
    ]
    assert max(gaps) < 0.01


def test_later_turns_go_on_from_states_and_drafts_are_accepted_and_rejected(arms):
    _, ours = arms
    reused = [answer["cached"] for answer in ours["answers"]]
    first, later = reused[::TURNS], [reused[at::TURNS] for at in range(1, TURNS)]
    assert set(first) == {0}
    assert all(cached > 0 for turn in later for cached in turn)
    metrics = ours["metrics"]
    drafted, accepted = metrics["draft_tokens_total", ""], metrics["accepted_tokens_total", ""]
    assert 0.1 * drafted < accepted < 0.9 * drafted
    assert metrics["anomalies_total", ""] == 0
    assert metrics["skips_total", "past_stop"] > 0
