"""States that SGLang keeps by the same slot beside the pool: they travel with it, bit for bit.

`ShortConvPool` and `NGramPool`, as Qwen4-Exp has them; SGLang's own int8 pool refuses both.
"""

import pytest
import torch
from cache_layer import CORES, STATE_BYTES, Traffic, plugin
from scheduled import admit
from sglang.srt.mem_cache.ple_state_pool import NGramPool, ShortConvPool
from test_int8 import finish, restore

FIRST, OTHERS = 1, 2


def with_side_states(core: str) -> Traffic:
    with plugin(policy="gds", int8=True, int8_slots=8):
        traffic = Traffic(core, slots=2, side_states=True)
    assert type(traffic.requests.short_conv_pool) is ShortConvPool
    assert type(traffic.requests.ngram_pool) is NGramPool
    return traffic


def rows(traffic: Traffic, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
    pools = traffic.requests
    return pools.short_conv_pool.conv_state[:, slot], pools.ngram_pool.context[slot]


def fill(traffic: Traffic, slot: int, seed: int) -> None:
    made = torch.Generator().manual_seed(seed)
    conv, context = rows(traffic, slot)
    conv.copy_(torch.randn(conv.shape, generator=made))
    context.copy_(torch.randint(2**62, context.shape, generator=made))


@pytest.mark.parametrize("core", CORES)
def test_d_side_rows_come_back_although_their_slot_was_used_by_another_request(core):
    traffic = with_side_states(core)
    first = admit(traffic, list(range(30)))
    slot = int(first.kv.mamba_pool_idx)
    fill(traffic, slot, FIRST)
    conv, context = (row.clone() for row in rows(traffic, slot))
    finish(traffic, first, 30)

    others = [admit(traffic, [900 + n] * 20) for n in range(2)]
    taken = [int(other.kv.mamba_pool_idx) for other in others]
    assert slot in taken
    for other in taken:
        fill(traffic, other, OTHERS)
    assert not torch.equal(rows(traffic, slot)[1], context)
    for other in others:
        finish(traffic, other, 20)

    again = admit(traffic, [*range(30), 7])
    assert again.prefix_len == 30
    restore(traffic, again)
    conv_now, context_now = rows(traffic, int(again.kv.mamba_pool_idx))
    assert torch.equal(conv_now, conv)
    assert torch.equal(context_now, context)


def test_side_states_count_in_the_bytes_of_a_state():
    """2 layers of 16 x 3 values of bfloat16, and 5 tokens of 8 bytes."""
    traffic = with_side_states("rust")
    pool = traffic.requests.mamba_ckpt_pool
    assert pool.mem_usage_bytes() == (8 + 1) * (STATE_BYTES["at rest"] + 2 * 16 * 3 * 2 + 5 * 8)


def test_an_unknown_side_state_is_refused():
    class Unknown:
        """Another state kept by the same slot."""

    with plugin(policy="gds", int8=True, int8_slots=8):
        traffic = Traffic("rust", slots=2)
        traffic.requests.mamba_pool.register_slot_state(Unknown())
        from statecache_sglang.checkpoints import CheckpointSlots

        with pytest.raises(SystemExit, match="does not know the state Unknown"):
            CheckpointSlots(traffic.requests, 8)
