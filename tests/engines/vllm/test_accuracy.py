"""How far log-probabilities move: int8 checkpoints against exact ones, and batches with preemption.

The model is random: its likeliest tokens are near to another, so that a small difference changes
the output. Two runs are compared up to the first token that differs, at the tokens that are among
the 20 likeliest in both.
"""

import itertools
import statistics

import pytest
from engine import document, run
from test_restore import drop_state_blocks


def differences(some, others):
    """Every difference of two log-probabilities, and how many outputs are the same."""
    found = []
    for (tokens, likely), (other_tokens, other_likely) in zip(some, others, strict=True):
        for token, other, here, there in zip(
            tokens, other_tokens, likely, other_likely, strict=True
        ):
            found += [
                abs(here[candidate] - there[candidate]) for candidate in here.keys() & there.keys()
            ]
            if token != other:
                break
    same = sum(output[0] == other[0] for output, other in zip(some, others, strict=True))
    return found, same


def said(name, found, same, of):
    mean, top = statistics.fmean(found), max(found)
    print(f"{name}: {same} of {of} outputs the same, log-probabilities {mean:.4f} apart on the")
    print(f"  mean, {top:.4f} at most, over {len(found)}")
    return mean, top


# 100 prompts, restored from checkpoints.


def from_checkpoints(model, plugin):
    """36 tokens each, of which 32 are restored; the same chunks and batches in every mode."""
    prompts = [document(i, 36) for i in range(100)]
    with run(model, blocks=1000, max_model_len=64, plugin=plugin) as engine:
        engine.weigh(prompts, tokens=1)
        assert len(engine.scheduler_side.checkpoints) == 100
        assert drop_state_blocks(engine) == 300
        found = engine.weigh(prompts, tokens=4)
        assert engine.scheduler_side.checkpoints.counts.restored == 100
    return found


def test_int8_checkpoints_move_log_probabilities_little(model):
    """Over 100 prompts of 4 tokens: measured 51 the same, .053 apart on the mean, 1.2 at most.

    The state is bfloat16 here; batches and preemption alone move log-probabilities by .015.
    """
    exact = from_checkpoints(model, {"checkpoints": "native", "checkpoint_slots": 100})
    int8 = from_checkpoints(model, {"checkpoints": "int8", "checkpoint_slots": 100})
    found, same = differences(exact, int8)
    mean, top = said("int8 against exact", found, same, 100)
    assert same >= 40
    assert 0 < mean < 0.08
    assert top < 2.5


# Batches and preemption: 12 requests, 4 at a time, twice.

PROMPTS = [document(i % 6, 120 + i) for i in range(12)]
# `stock` hands out vLLM's own blocks one for one (test_scheduler.py), so it is vLLM.
PLUGINS = {"reuse": {}, "native": {"checkpoints": "native", "checkpoint_slots": 12}}


def in_batches(model, blocks, plugin=None):
    """What comes out, and how often a request was preempted."""
    count = 0
    with run(model, blocks=blocks, max_model_len=256, plugin=plugin) as engine:
        original = engine.scheduler._preempt_request

        def preempt(*args, **more):
            nonlocal count
            count += 1
            return original(*args, **more)

        engine.scheduler._preempt_request = preempt
        found = engine.weigh(PROMPTS, tokens=24) + engine.weigh(PROMPTS, tokens=24)
    return found, count


SCARCE = (24, 26, 28)


@pytest.fixture(scope="module")
def stock(model):
    """VLLM with room for all, and the most that the number of blocks alone changes in it."""
    room, none = in_batches(model, 200)
    assert none == 0
    runs = {200: room}
    for blocks in SCARCE:
        runs[blocks], some = in_batches(model, blocks)
        assert some > 0
    most = [
        said(f"vLLM, {count} and {other} blocks", *differences(runs[count], runs[other]), 24)
        for count, other in itertools.combinations(runs, 2)
    ]
    return room, [max(column) for column in zip(*most, strict=True)]


@pytest.mark.parametrize("plugin", PLUGINS)
def test_batches_and_preemption_move_no_more_than_without_the_plugin(model, stock, plugin):
    """Three numbers of blocks together against 200 blocks, as vLLM itself between any two.

    Measured: vLLM's pairs .0064 to .0145 on the mean, with 24, 26 and 28 blocks against 200 .0129,
    .0145 and .0100. `reuse` .0129, .0170 and .0100, checkpoints .0129, .0115 and .0107. The largest
    is .96 with and without the plugin.
    """
    room, (stock_mean, stock_top) = stock
    every = []
    for blocks in SCARCE:
        scarce, some = in_batches(model, blocks, PLUGINS[plugin])
        assert some > 0
        found, same = differences(room, scarce)
        said(f"{plugin}, {blocks} blocks, {some} preemptions", found, same, 24)
        every += found
    assert statistics.fmean(every) <= stock_mean
    assert max(every) <= stock_top
