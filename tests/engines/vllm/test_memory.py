"""Memory for checkpoints, worked by hand for states of one layer a group.

Convolution 3 * 512 * 2 = 3,072 bytes; temporal 4 * 64 * 64 * 4 = 65,536 bytes in fp32, in int8
16,384 and scales 4 * 64 * 4 = 1,024. Three layers: 205,824 bytes exact, 61,440 in int8.
"""

import types

import pytest
from scheduled import Run, _groups
from torch import empty

from statecache.settings import Settings
from statecache_vllm.checkpoint_memory import describe, pool_slots, set_aside
from statecache_vllm.chunks import clip

NATIVE, INT8 = 205_824, 61_440
SPECS = [group.kv_cache_spec for group in _groups(16)]


def settings(**given):
    return Settings.from_given({"kv_cache_plugin": "statecache", **given}, {})


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({}, 1_000_000),
        ({"checkpoints": "native"}, 900_000),
        ({"int8": True}, 900_000),
        ({"checkpoints": "native", "checkpoint_slots": 2}, 1_000_000 - 2 * NATIVE),
        ({"int8": True, "int8_slots": 10}, 1_000_000 - 10 * INT8),
    ],
)
def test_what_is_left_for_blocks(given, left):
    assert set_aside(settings(**given), SPECS, 1_000_000) == left


def test_more_slots_than_memory_stop_with_the_numbers():
    with pytest.raises(SystemExit, match=r"5 checkpoints of 205,824 bytes need 1,029,120 bytes"):
        set_aside(settings(checkpoints="native", checkpoint_slots=5), SPECS, 1_000_000)


@pytest.mark.parametrize(("mode", "one"), [("native", NATIVE), ("int8", INT8)])
def test_the_pool_is_a_tenth_of_blocks_and_checkpoints_together(mode, one):
    """A page is the larger of a state's 68,608 bytes and the KV's 16,384; a ninth of the blocks."""
    groups = _groups(16)
    config = types.SimpleNamespace(kv_cache_groups=groups, num_blocks=900)
    cache = types.SimpleNamespace(num_gpu_blocks_override=None)
    slots = pool_slots(
        settings(checkpoints=mode), types.SimpleNamespace(cache_config=cache), config
    )
    assert slots == 100 * 68_608 // one
    assert (slots + 1) * one > 100 * 68_608


def test_a_state_without_one_temporal_tensor_is_refused():
    conv, temporal = empty(1, 3, 8), empty(1, 4, 8, 8)
    found, rest = describe([conv, temporal, conv])
    assert found is temporal
    assert len(rest) == 2
    for tensors in ([conv], [temporal, temporal]):
        with pytest.raises(SystemExit, match="does not know states of shapes"):
            describe(tensors)


@pytest.mark.parametrize(
    ("start", "tokens", "kept"),
    [(0, 64, 64), (0, 65, 64), (60, 4, 4), (60, 5, 4), (64, 100, 64), (70, 10, 10)],
)
def test_a_chunk_does_not_run_past_a_multiple_of_64(start, tokens, kept):
    assert clip(start, tokens, 64) == kept


def test_the_scheduler_and_the_book_have_the_same_slots(model):
    run = Run(model, blocks=901, plugin={"checkpoints": "native"})
    assert run.planner.book.slots == 901 * 68_608 // 9 // NATIVE
