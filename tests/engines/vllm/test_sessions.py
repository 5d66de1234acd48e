"""Growing agent sessions under block pressure: tokens reused, at one amount of memory in all.

12 sessions of 8 turns, three seeds, 16-token blocks; memory is 320 pages of 16 tokens of KV, and a
state in the pool takes its pages away from the blocks. Measured: vLLM .830, `stock` through the
plugin .830, `reuse` .833, 24 native checkpoints .823, 24 int8 checkpoints .846. Exact copies do
not pay here: a state takes as much memory in the pool as in blocks, and blocks that hold both kinds
adapt by themselves. In int8 they do.
"""

import pytest
from sessions import INT8, NATIVE, reused

PAGES = 320


@pytest.fixture(scope="module")
def shares(model):
    native = {"checkpoints": "native", "checkpoint_slots": 24}
    return {
        "vLLM": reused(model, PAGES),
        "stock": reused(model, PAGES, {"block_order": "stock"}),
        "reuse": reused(model, PAGES, {}),
        "native": reused(model, PAGES, native, 24, NATIVE),
        "int8": reused(model, PAGES, {"int8": True, "int8_slots": 24}, 24, INT8),
    }


def test_int8_checkpoints_reuse_more_than_vllm_and_than_exact_copies(shares):
    assert shares["int8"] > shares["vLLM"] + 0.01
    assert shares["int8"] > shares["native"] + 0.01


def test_the_order_reuse_is_no_worse_than_vllms(shares):
    assert shares["reuse"] > shares["vLLM"] - 0.002


def test_the_order_stock_reuses_what_vllm_does(shares):
    assert shares["stock"] == pytest.approx(shares["vLLM"], abs=0.002)
