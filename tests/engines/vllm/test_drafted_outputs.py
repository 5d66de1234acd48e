"""MTP on the real engine: what the checkpoints give is what vLLM alone gives, bit by bit.

The two copies that a CPU lacks are stand-ins (`align_kernels`); vLLM itself cannot draft by ngram
on a CPU: k=3 does not return, k=2 leaves MTP's tokens at the third.
"""

from typing import Any, NamedTuple

import align_kernels
import pytest
import tiny_models
from engine import BLOCK, Engine, document, run
from test_restore import drop_state_blocks
from vllm import SamplingParams
from vllm.inputs import TokensPrompt

from support.mtp_head import add_drafter

# Drafts a step, and how the model is made: a head that is never right, at times, always.
DRAFTERS: dict[str, tuple[int, dict[str, Any]]] = {
    "none": (1, {"right": False}),
    "some": (2, {"noise": 4.0}),
    "all": (3, {}),
}
SLOTS = {"checkpoints": "native", "checkpoint_slots": 24}
NEW = 40  # tokens of an answer: longer than a block


class Answer(NamedTuple):
    """What came out of a request."""

    cached: int
    tokens: list[int]
    weights: list[float]


class Served(NamedTuple):
    answers: list[Answer]
    drafted: int
    accepted: int
    boundaries: set[str]  # on what the end of a block fell: an accepted draft, a rejected one
    twice: list[int]  # cached tokens of a prompt whose answer is one token, asked twice
    restored: int
    numbers: dict[str, float]


def ask(engine: Engine, prompts: list[list[int]], tokens: int = NEW) -> list[Answer]:
    """All requests at once, with the log-probability of each token that came out."""
    inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0)
    outputs = engine.llm.generate(inputs, sampling, use_tqdm=False)
    return [
        Answer(
            output.num_cached_tokens or 0,
            list(output.outputs[0].token_ids),
            [
                at[token].logprob
                for at, token in zip(
                    output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True
                )
            ],
        )
        for output in outputs
    ]


def watch(engine: Engine, counts: list[int]) -> set[str]:
    """Count drafted and accepted tokens, and see on what the ends of blocks fall among them."""
    scheduler, found = engine.scheduler, set[str]()
    update = scheduler.update_from_output

    def look(planned: Any, output: Any) -> Any:
        for name, drafts in planned.scheduled_spec_decode_tokens.items():
            sampled = output.sampled_token_ids[output.req_id_to_index[name]]
            counts[0] += len(drafts)
            counts[1] += len(sampled) - 1
            first = scheduler.requests[name].num_computed_tokens - len(drafts)
            for draft in range(1, len(drafts) + 1):
                if (first + draft) % BLOCK == 0:
                    found.add("accepted" if draft < len(sampled) else "rejected")
        return update(planned, output)

    scheduler.update_from_output = look
    return found


def served(model: Any, drafts: int, plugin: dict[str, Any] | None) -> Served:
    """Three turns of three conversations; before the third all states are gone but checkpoints."""
    drafter = {"method": "mtp", "num_speculative_tokens": drafts}
    first = [document(number, 260 + 9 * number) for number in range(3)]
    with run(model, blocks=160, plugin=plugin, speculative_config=drafter) as engine:
        counts = [0, 0]
        boundaries = watch(engine, counts)
        answers = [answer for prompt in first for answer in ask(engine, [prompt])]
        turns = [
            prompt + answer.tokens + document(9, 50)
            for prompt, answer in zip(first, answers, strict=True)
        ]
        answers += [answer for prompt in turns for answer in ask(engine, [prompt])]
        once = document(12, 300)
        twice = ask(engine, [once], 1)
        if plugin is not None:
            assert drop_state_blocks(engine) > 0
        twice += ask(engine, [once], 1)
        answers += [answer for prompt in turns for answer in ask(engine, [[*prompt, 7]])]
        answers += ask(engine, [[*prompt, 8, 9] for prompt in turns])
        restored, numbers = 0, {}
        if plugin is not None:
            side = engine.scheduler_side
            assert side.faults.anomalies == 0
            assert side.checkpoints.pinned == 0
            side.checkpoints.check()
            restored = side.checkpoints.counts.restored
            numbers = side.report.counts.numbers
        return Served(
            answers, *counts, boundaries, [answer.cached for answer in twice], restored, numbers
        )


@pytest.fixture(scope="module", params=DRAFTERS)
def arms(request, tmp_path_factory):
    """The same requests of vLLM alone, with exact checkpoints, and for one drafter with int8."""
    align_kernels.install()
    drafts, made = DRAFTERS[request.param]
    folder = tiny_models.make_tiny_model("qwen3_next", tmp_path_factory.mktemp("drafting"))
    model = add_drafter(folder, **made)
    int8 = {**SLOTS, "checkpoints": "int8"}
    kinds = {"alone": None, "native": SLOTS} | ({"int8": int8} if request.param == "some" else {})
    return request.param, {kind: served(model, drafts, kinds[kind]) for kind in kinds}


def test_answers_hits_and_log_probabilities_are_those_of_vllm(arms):
    """So they are where a block ends on an accepted draft, and where it ends on a rejected one."""
    kind, found = arms
    alone, native = found["alone"], found["native"]
    assert native.answers == alone.answers
    assert native.restored > 3
    assert (native.drafted, native.accepted) == (alone.drafted, alone.accepted)
    share = alone.accepted / alone.drafted
    if kind == "some":
        assert 0.1 < share < 0.3
        assert alone.boundaries == {"accepted", "rejected"}
    else:
        assert share == (kind == "all")
        assert alone.boundaries == {"accepted" if share else "rejected"}


def test_a_state_stored_in_the_last_step_before_nothing_is_left_to_do_is_a_hit(arms):
    """A prompt of 300 tokens, asked twice for one token each: 8 of its 9 blocks, less the last."""
    _, found = arms
    for kind in found:
        assert found[kind].twice == [0, 8 * BLOCK]


def test_int8_hits_as_deep_and_the_metrics_say_what_was_drafted(arms):
    _, found = arms
    hits = [answer.cached for answer in found["alone"].answers]
    for kind in set(found) - {"alone"}:
        assert [answer.cached for answer in found[kind].answers] == hits
        numbers = found[kind].numbers
        assert numbers["draft_tokens"] == found[kind].drafted
        assert numbers.get("accepted_tokens", 0) == found[kind].accepted
        assert numbers["draft_lost_tokens"] % BLOCK == 0 < numbers["draft_lost_tokens"]
