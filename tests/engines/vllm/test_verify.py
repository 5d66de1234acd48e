"""A state that is not what its slot should hold: found before an answer goes out, in a real vLLM.

Each answer must be that of vLLM alone.
"""

import pytest
import torch
from engine import cached, document, run, texts
from test_restore import drop_state_blocks
from vllm import SamplingParams
from vllm.inputs import TokensPrompt

from statecache_vllm import seams

SLOTS = {"checkpoints": "native", "checkpoint_slots": 16}
# States of blocks of 32 tokens: after 256 of the first two, after 512 of the third.
FIRST, SECOND = document(1, 276), document(2, 276)
LONG = document(3, 532)
PROMPTS = [FIRST, SECOND, LONG]


@pytest.fixture(scope="module")
def expected(model):
    """What vLLM alone answers, cold."""
    with run(model) as engine:
        return texts(engine.ask(PROMPTS))


def worker():
    return seams.transfer_group().worker_side.store


def slots_by_depth(engine):
    """The slots of all states: their blocks, and in which order they were stored."""
    checkpoints = engine.scheduler_side.checkpoints
    depth = checkpoints.tree.depth_of
    return {(depth(state), state): slot for state, slot in checkpoints._slot.items()}


def swap(engine, state, other):
    """Plant an error in the scheduler: it takes the slot of one state for that of another."""
    slots = engine.scheduler_side.checkpoints._slot
    slots[state], slots[other] = slots[other], slots[state]


def flip(slot):
    """Plant an error in memory: one bit of a state is another one."""
    (row, *_) = worker()._pools[0].pool._rows(slot * len(worker()._pools[0].groups))
    row[0].view(torch.uint8).reshape(-1)[5] ^= 1


def found(engine):
    numbers = engine.scheduler_side.proofs.events.numbers
    name = "restore_mismatches|"
    return {key.removeprefix(name): int(n) for key, n in numbers.items() if key.startswith(name)}


PLANTED = {
    "prefix": lambda engine, states: swap(engine, states[8][0], states[8][1]),
    "depth": lambda engine, states: swap(engine, states[8][0], states[16][0]),
    "bytes": lambda _, states: flip(states["slot"][states[8][0]]),
}


def plant(engine, what):
    states = {"slot": {}}
    for (depth, state), slot in sorted(slots_by_depth(engine).items()):
        states.setdefault(depth, []).append(state)
        states["slot"][state] = slot
    PLANTED[what](engine, states)


@pytest.mark.parametrize("mode", ["native", "int8"])
@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_wrong_state_is_found_and_the_answer_is_right(
    model, expected, caplog, what, mode
):
    """Records are compared at any rate, bytes at rate 1."""
    rate = 1 if what == "bytes" else 0
    plugin = {**SLOTS, "checkpoints": mode, "verify": rate}
    with run(model, plugin=plugin) as engine:
        assert texts(engine.ask(PROMPTS)) == expected
        drop_state_blocks(engine)
        plant(engine, what)
        again = engine.ask([FIRST])
        assert texts(again) == expected[:1]
        assert found(engine) == {what: 1}
        assert engine.scheduler_side.faults.anomalies == 1
        assert f"({what})" in caplog.text
        # All was forgotten; what is stored from now on serves again.
        assert texts(engine.ask(PROMPTS)) == expected
        drop_state_blocks(engine)
        served = engine.ask(PROMPTS)
        assert cached(served) == [256, 256, 512]
        if mode == "native":
            assert texts(served) == expected
        assert found(engine) == {what: 1}
        assert engine.scheduler_side.parts.faults.active
        engine.scheduler_side.checkpoints.check()


def test_without_the_check_the_answer_is_another_one(model, expected, monkeypatch):
    """What the other tests guard against is real: a state of another prompt changes the answer."""
    from statecache.checkpoint.proof import SlotRecords

    monkeypatch.setattr(SlotRecords, "mismatch", lambda *_: None)
    with run(model, plugin=SLOTS) as engine:
        engine.ask(PROMPTS)
        drop_state_blocks(engine)
        plant(engine, "prefix")
        assert texts(engine.ask([FIRST])) != expected[:1]


def first_token(engine, salt=None, beside=()):
    """The 20 likeliest first tokens after FIRST, by their logprob; others may be asked with it."""
    inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in (*beside, FIRST)]
    if salt is not None:
        for request in inputs:
            request["cache_salt"] = salt
    sampling = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
    answer = engine.llm.generate(inputs, sampling, use_tqdm=False)[-1]
    (at,) = answer.outputs[0].logprobs
    return answer.num_cached_tokens, {token: found.logprob for token, found in at.items()}


def distance(one, other):
    """The largest difference between tokens that are among the likeliest of both."""
    return max(abs(one[token] - other[token]) for token in one.keys() & other.keys())


def test_requests_alone_tell_a_wrong_state_from_rounding(model, monkeypatch):
    """docs/verify.md: resumed, and twice afresh under salts of their own, in two chunkings."""
    from statecache.checkpoint.proof import SlotRecords

    monkeypatch.setattr(SlotRecords, "mismatch", lambda *_: None)
    with run(model, blocks=200, plugin=SLOTS) as engine:
        engine.ask(PROMPTS)
        (none, fresh), (too, chunked) = (
            first_token(engine, "one"),
            first_token(engine, "two", beside=[document(7, 100)]),
        )
        assert (none, too) == (0, 0)
        drop_state_blocks(engine)
        cached_tokens, right = first_token(engine)
        assert cached_tokens == 256
        drop_state_blocks(engine)
        plant(engine, "prefix")
        cached_tokens, wrong = first_token(engine)
        assert cached_tokens == 256
        spread = distance(fresh, chunked)
        assert distance(right, fresh) <= 2 * spread
        assert distance(wrong, fresh) > 4 * spread


def test_requests_beside_the_wrong_one_are_computed_again(model, expected):
    with run(model, plugin={**SLOTS, "verify": 1}) as engine:
        engine.ask([FIRST])
        drop_state_blocks(engine)
        plant(engine, "bytes")
        answers = texts(engine.ask_together([SECOND, FIRST]))
        assert answers == [expected[1], expected[0]]
        assert found(engine) == {"bytes": 1}
        assert engine.pool.get_num_free_blocks() == len(engine.pool.blocks) - 1


def test_a_closer_look_finds_nothing_where_nothing_is_wrong(model):
    """Int8 at rate 1: all states are added up, restores compared, errors measured."""
    with run(model, plugin={**SLOTS, "checkpoints": "int8", "verify": 1}) as engine:
        engine.ask(PROMPTS)
        drop_state_blocks(engine)
        assert cached(engine.ask(PROMPTS)) == [256, 256, 512]
        numbers = engine.scheduler_side.proofs.events.numbers
        assert numbers["verified_stores"] == 3
        assert numbers["verified_restores"] == 3
        assert found(engine) == {}
        assert engine.scheduler_side.faults.anomalies == 0
        (kind,) = (key.partition("|")[2] for key in numbers if key.startswith("int8_error_max"))
        assert kind.startswith("gdn")
        layers = numbers[f"int8_error_layers|{kind}"]
        assert layers == 3 * sum(
            len(pool.groups) * len(pool.active.temporal) for pool in worker()._pools
        )
        mean = numbers[f"int8_error_sum|{kind}"] / layers
        assert 0 < mean <= numbers[f"int8_error_max|{kind}"] < 0.05
