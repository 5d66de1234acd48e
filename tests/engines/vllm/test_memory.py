"""Memory for checkpoints, worked by hand for states of one layer a group.

Convolution 3 * 512 * 2 = 3,072 bytes; temporal 4 * 64 * 64 * 4 = 65,536 bytes in fp32, in int8
16,384 and scales 4 * 64 * 4 = 1,024. Three layers: 205,824 bytes exact, 61,440 in int8.
"""

import types
from contextlib import nullcontext
from dataclasses import replace

import pytest
from scheduled import Run, _groups
from torch import bfloat16, empty
from vllm.engine.arg_utils import EngineArgs

from statecache.engine.settings import Settings
from statecache.errors import SettingsError
from statecache_vllm import adapter, checkpoint_memory, seams
from statecache_vllm.checkpoint_memory import (
    describe,
    dry_run_sizes,
    knows_states,
    pool_slots,
    set_aside,
    with_host_size,
)
from statecache_vllm.prefill_chunks import clip
from statecache_vllm.recording import begin

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
        ({"checkpoints": "int8", "checkpoint_slots": 10}, 1_000_000 - 10 * INT8),
        # A ring of four states.
        ({"checkpoints": "int8", "checkpoint_memory": "host"}, 1_000_000 - 4 * INT8),
        (
            {"checkpoints": "native", "checkpoint_memory": "host", "checkpoint_slots": 99},
            1_000_000 - 4 * NATIVE,
        ),
    ],
)
def test_what_is_left_for_blocks(given, left):
    assert set_aside(settings(**given), SPECS, 1_000_000) == left


@pytest.mark.parametrize(
    ("given", "need"),
    [
        ({"checkpoints": "native", "checkpoint_slots": 5}, 5 * NATIVE),
        ({"checkpoints": "int8", "checkpoint_slots": 5}, 5 * INT8),
    ],
)
def test_more_slots_than_memory_stop_with_the_numbers_and_the_flag(given, need):
    with pytest.raises(SystemExit) as e:
        set_aside(settings(**given), SPECS, need - 1)
    mode = given["checkpoints"]
    assert str(e.value) == (
        f"statecache: --statecache-checkpoint-slots: 5 {mode} checkpoints of {need // 5:,} bytes"
        f" need {need:,} bytes, {need - 1:,} are there for blocks and checkpoints: give fewer"
    )


def test_a_ring_that_leaves_nothing_for_blocks_stops_with_the_numbers():
    with pytest.raises(SystemExit) as e:
        set_aside(settings(checkpoints="int8", checkpoint_memory="host"), SPECS, 4 * INT8)
    assert str(e.value) == (
        "statecache: --statecache-checkpoint-memory host: 245,760 bytes are needed on the device,"
        " 245,760 are there for blocks and checkpoints: raise --gpu-memory-utilization"
    )


@pytest.fixture(autouse=True)
def registered():
    adapter.register()


def pool_of(slots: int, mode: str) -> dict:
    pool = {"statecache_checkpoints": mode, "statecache_checkpoint_slots": slots}
    return {"kv_cache_plugin": "statecache", **pool}


@pytest.mark.parametrize("mode", ["native", "int8"])
def test_more_slots_than_any_device_has_memory_for_stop_before_the_engine(any_model, mode):
    folder, block = any_model
    engine_args = EngineArgs(
        model=str(folder), block_size=block, additional_config=pool_of(10**9, mode)
    )
    with pytest.raises(SystemExit) as stopped:
        engine_args.create_engine_config()
    line, have = str(stopped.value), f"{seams.device_memory():,}"
    start = f"statecache: --statecache-checkpoint-slots: 1000000000 {mode} checkpoints of "
    assert line.startswith(start)
    assert line.endswith(f",000,000,000 bytes, and a device here has {have}: give fewer")
    assert "\n" not in line


@pytest.mark.parametrize("short", [0, 1])
def test_slots_that_fit_exactly_pass_before_the_engine(monkeypatch, model, short):
    """Six layers: convolution 3 * 512 * 2, temporal 4 * 64 * 64 * 2: 35,840 bytes each."""
    monkeypatch.setattr(seams, "device_memory", lambda: 7 * 6 * 35_840 - short)
    engine_args = EngineArgs(
        model=str(model),
        dtype="bfloat16",
        block_size=32,
        mamba_ssm_cache_dtype="bfloat16",
        additional_config=pool_of(7, "native"),
    )
    with pytest.raises(SystemExit) if short else nullcontext():
        engine_args.create_engine_config()


@pytest.mark.parametrize(("mode", "slot_bytes"), [("native", NATIVE), ("int8", INT8)])
def test_the_pool_is_a_tenth_of_blocks_and_checkpoints_together(mode, slot_bytes):
    """A page is the larger of a state's 68,608 bytes and the KV's 16,384; a ninth of the blocks."""
    groups = _groups(16)
    config = types.SimpleNamespace(kv_cache_groups=groups, num_blocks=900)
    cache = types.SimpleNamespace(num_gpu_blocks_override=None)
    slots = pool_slots(
        settings(checkpoints=mode), types.SimpleNamespace(cache_config=cache), config
    )
    assert slots == 100 * 68_608 // slot_bytes
    assert (slots + 1) * slot_bytes > 100 * 68_608


@pytest.mark.parametrize(("mode", "slot_bytes"), [("native", NATIVE), ("int8", INT8)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_share_the_host_memory_that_was_asked_for(mode, slot_bytes, ranks):
    """In a dry run, too."""
    config = types.SimpleNamespace(kv_cache_groups=_groups(16), num_blocks=900)
    cache = types.SimpleNamespace(num_gpu_blocks_override=None)
    engine = types.SimpleNamespace(cache_config=cache)
    asked = settings(checkpoints=mode, checkpoint_memory=f"host:{ranks * (5 * slot_bytes + 1)}")
    on_host = with_host_size(asked, ranks)
    assert pool_slots(on_host, engine, config) == 5
    assert dry_run_sizes(on_host, config)[0] == 5
    asked = settings(checkpoints=mode, checkpoint_memory=f"host:{ranks * slot_bytes - 1}")
    too_small = with_host_size(asked, ranks)
    with pytest.raises(SystemExit, match=r"does not fit in the .* host memory .* host:SIZE"):
        pool_slots(too_small, engine, config)


def test_the_host_memory_is_settled_once_and_checked_against_what_is_free(monkeypatch, caplog):
    def resolved(memory, **more):
        asked = settings(checkpoints="int8", checkpoint_memory=memory, **more)
        return with_host_size(asked, 2).checkpoint_memory

    monkeypatch.setattr(checkpoint_memory, "_free_on_host", lambda: 5_000)
    assert resolved("device") == "device"
    with caplog.at_level("INFO", logger="statecache.vllm"):
        assert resolved("host") == "host:250"
    assert "500 bytes of host memory for the checkpoints of 2 ranks" in caplog.text
    assert resolved("host:5000") == "host:2500"
    assert resolved("host:2KiB") == "host:1024"
    assert resolved("host", checkpoint_slots=7) == "host"
    with pytest.raises(SettingsError, match="host:5001: 5,000 bytes of host memory are free"):
        resolved("host:5001")
    monkeypatch.setattr(checkpoint_memory, "_free_on_host", lambda: None)
    assert resolved("host:5001") == "host:2500"
    with pytest.raises(SettingsError, match="give host:SIZE"):
        resolved("host")


def test_a_state_without_one_temporal_tensor_is_refused():
    conv, temporal = empty(1, 3, 8), empty(1, 4, 8, 8)
    found, rest = describe([conv, temporal, conv])
    assert found is temporal
    assert len(rest) == 2
    for tensors in ([conv], [temporal, temporal]):
        with pytest.raises(SystemExit, match="does not know states of shapes"):
            describe(tensors)


def test_a_dry_run_over_states_of_another_shape_says_so_and_stops_nothing(caplog):
    """The pool refuses them, as above: the dry run must not, which changes nothing."""
    groups = _groups(16)
    config = types.SimpleNamespace(kv_cache_groups=groups, num_blocks=900)
    assert knows_states(config)
    for group in groups:
        if seams.is_mamba(group.kv_cache_spec):
            spec = replace(group.kv_cache_spec, shapes=((3, 512),), dtypes=(bfloat16,))
            group.kv_cache_spec = spec
    assert begin(settings(dry_run=True), None, None, config) is None
    assert "does not know this model's states: no dry run" in caplog.text


@pytest.mark.parametrize(
    ("start", "tokens", "kept"),
    [(0, 64, 64), (0, 65, 64), (60, 4, 4), (60, 5, 4), (64, 100, 64), (70, 10, 10)],
)
def test_a_chunk_does_not_run_past_a_multiple_of_64(start, tokens, kept):
    assert clip(start, tokens, 64) == kept


def test_the_scheduler_and_the_checkpoints_have_the_same_slots(model):
    run = Run(model, blocks=901, plugin={"checkpoints": "native"})
    assert run.scheduler_side.checkpoints.slots == 901 * 68_608 // 9 // NATIVE
