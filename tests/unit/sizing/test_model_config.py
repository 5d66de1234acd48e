"""Bytes of a state and of a KV token, worked by hand for published models."""

import json
from pathlib import Path

import pytest

from statecache.errors import SettingsError
from statecache.sizing.model_config import HybridModel, read_model
from statecache_vllm.sizing import block_tokens
from support.model_configs import (
    FALCON_H1_1_5B,
    GRANITE_4_TINY,
    KIMI_LINEAR,
    NEMOTRON_3_NANO,
    PUBLISHED,
    QWEN3_5,
    QWEN3_NEXT,
)


def read(folder: Path, keys: object, ranks: int = 1) -> HybridModel:
    (folder / "config.json").write_text(json.dumps(keys))
    return read_model(folder, ranks)


def mib(count: int) -> float:
    return round(count / 2**20, 1)


def test_qwen3_next_to_the_byte(tmp_path):
    """A layer: 32 x 128 x 128 values, and 3 of each of 2 x 16 x 128 + 32 x 128 = 8,192 channels."""
    model = read(tmp_path, QWEN3_NEXT)
    assert (model.state_layers, model.attention_layers) == (36, 12)
    assert (model.temporal, model.conv_values) == ((32, 128, 128), 24_576)
    assert model.state_bytes("sglang") == 36 * (4 * 524_288 + 2 * 24_576) == 77_266_944
    assert model.state_bytes("vllm") == 36 * (2 * 524_288 + 2 * 24_576) == 39_518_208
    assert (
        model.bytes_at_rest("int8", "sglang")
        == 36 * (524_288 + 4 * 4_096 + 2 * 24_576)
        == 21_233_664
    )
    assert (
        model.bytes_at_rest("int8", "vllm") == 36 * (524_288 + 2 * 4_096 + 2 * 24_576) == 20_938_752
    )
    assert model.kv_token_bytes() == 12 * 2 * 2 * 256 * 2 == 24_576
    assert model.kv_token_bytes("fp8") == 12_288
    # 1,097,728 bytes a layer, 2,048 bytes of KV a token and layer: 536 tokens at least.
    assert block_tokens(model, 16) == 544
    assert block_tokens(model, 16, None, "float32") == 1_056  # 1,048 of 2,146,304 bytes


@pytest.mark.parametrize(
    ("keys", "layers", "full", "half", "int8"),
    [
        (QWEN3_NEXT, (36, 12), 73.7, 37.7, 20.2),
        (QWEN3_5, (30, 10), 61.4, 31.4, 16.9),
        (KIMI_LINEAR, (20, 7), 41.4, 21.4, 11.7),
        (NEMOTRON_3_NANO, (23, 6), 46.8, 23.8, 13.0),
    ],
)
def test_what_was_measured_of_published_models(tmp_path, keys, layers, full, half, int8):
    """MiB a state in fp32, in bf16, and of fp32 in int8."""
    model = read(tmp_path, keys)
    assert (model.state_layers, model.attention_layers) == layers
    assert mib(model.state_bytes("sglang")) == full
    assert mib(model.state_bytes("sglang", "bfloat16")) == half
    assert mib(model.bytes_at_rest("int8", "sglang")) == int8


def test_kimi_linear_keeps_one_latent_vector_a_token(tmp_path):
    for ranks in (1, 4):
        assert read(tmp_path, KIMI_LINEAR, ranks).kv_token_bytes() == 7 * (512 + 64) * 2
    heads = {k: v for k, v in KIMI_LINEAR.items() if k not in ("kv_lora_rank", "qk_rope_head_dim")}
    assert read(tmp_path, heads).kv_token_bytes() == 7 * 2 * 32 * 72 * 2


def test_granite_and_falcon(tmp_path):
    """A convolution runs over the inner channels and two groups of states: 3 values of each."""
    granite = read(tmp_path, GRANITE_4_TINY)
    assert (granite.state_layers, granite.attention_layers) == (36, 4)
    assert granite.conv_values == 3 * (3_072 + 2 * 128)
    assert granite.state_bytes("vllm") == 36 * (48 * 64 * 128 + 9_984) * 2
    assert granite.kv_token_bytes() == 4 * 2 * 4 * 128 * 2
    falcon = read(tmp_path, FALCON_H1_1_5B)
    assert (falcon.state_layers, falcon.attention_layers) == (24, 24)
    assert falcon.conv_values == 3 * (3_072 + 2 * 256)
    expanded = {**FALCON_H1_1_5B, "mamba_d_ssm": None, "mamba_n_heads": 64, "mamba_d_head": "auto"}
    assert read(tmp_path, expanded).temporal == (64, 64, 256)


def test_types_are_those_of_the_engine_unless_asked(tmp_path):
    def types(keys, engine, asked=None):
        return read(tmp_path, keys).state_dtypes(engine, asked)

    half = {**QWEN3_NEXT, "torch_dtype": "float16"}
    assert types(half, "sglang") == ("bfloat16", "float32")
    assert types(half, "vllm") == ("float16", "float16")
    assert types(half, "vllm", "float32") == ("float16", "float32")
    assert types({**half, "mamba_ssm_dtype": "float16"}, "sglang") == ("bfloat16", "float16")
    assert types(QWEN3_5, "vllm") == ("bfloat16", "float32")
    assert types(NEMOTRON_3_NANO, "vllm") == ("bfloat16", "float32")
    assert types({**NEMOTRON_3_NANO, "mamba_ssm_cache_dtype": "float16"}, "vllm")[1] == "float16"
    assert types(KIMI_LINEAR, "vllm") == ("bfloat16", "float32")
    assert types(GRANITE_4_TINY, "vllm") == ("bfloat16", "bfloat16")


def test_ranks_share_heads_and_channels(tmp_path):
    whole, half = read(tmp_path, QWEN3_NEXT), read(tmp_path, QWEN3_NEXT, 2)
    assert half.state_bytes("sglang") * 2 == whole.state_bytes("sglang")
    assert half.kv_token_bytes() * 2 == whole.kv_token_bytes()
    assert read(tmp_path, QWEN3_NEXT, 8).kv_token_bytes() * 2 == whole.kv_token_bytes()
    # One group for two ranks: each rank has a copy. (3,072 + 2 * 2 * 128) / 2 channels.
    assert read(tmp_path, GRANITE_4_TINY, 2).conv_values == 3 * (3_072 + 512) // 2


@pytest.mark.parametrize(
    ("keys", "ranks", "problem"),
    [
        (QWEN3_NEXT, 3, "16 key heads cannot be shared by --tp 3 ranks"),
        (FALCON_H1_1_5B, 32, "48 state heads cannot be shared by --tp 32 ranks"),
        ({**GRANITE_4_TINY, "num_key_value_heads": 3}, 2, "3 KV heads cannot be shared by --tp 2"),
        ({"model_type": "llama"}, 1, "model_type 'llama' is not known here: use one of qwen3_next"),
        ({"model_type": 3}, 1, "model_type 3 is not known here"),
        ({"model_type": ["llama"]}, 1, "model_type ['llama'] is not known here"),
        ({"text_config": {"model_type": {}}}, 1, "model_type {} is not known here"),
        ({}, 1, "names no model_type: use one of qwen3_next, qwen3_5_text"),
        ([], 1, "is not a JSON object (Expected `object`, got `array`)"),
        ({**QWEN3_NEXT, "linear_num_value_heads": None}, 1, "lacks linear_num_value_heads, which"),
        ({**QWEN3_NEXT, "head_dim": "256"}, 1, "head_dim is '256': a number from 1 up is expected"),
        ({**QWEN3_NEXT, "head_dim": True}, 1, "head_dim is True: a number from 1 up is expected"),
        ({**QWEN3_NEXT, "num_hidden_layers": 0}, 1, "num_hidden_layers is 0: a number from 1"),
        ({**QWEN3_NEXT, "full_attention_interval": 1}, 1, "this model has no recurrent layers"),
        ({**QWEN3_NEXT, "num_hidden_layers": 3}, 1, "this model has no attention layers"),
        ({**QWEN3_NEXT, "torch_dtype": "int4"}, 1, "dtype is 'int4': use float32, bfloat16"),
        ({**QWEN3_NEXT, "mamba_ssm_dtype": "int8"}, 1, "mamba_ssm_dtype is 'int8': use float32"),
        ({**GRANITE_4_TINY, "layer_types": None}, 1, "lacks layer_types, which a granitemoehybrid"),
        ({**GRANITE_4_TINY, "layer_types": [1]}, 1, "lacks layer_types"),
        ({**GRANITE_4_TINY, "mamba_d_head": 32}, 1, "48 state heads of 32 are not 3072 channels"),
        ({**KIMI_LINEAR, "linear_attn_config": {}}, 1, "lacks linear_attn_config with kda_layers"),
        ({**KIMI_LINEAR, "num_hidden_layers": 5}, 1, "this model has no attention layers"),
        ({**NEMOTRON_3_NANO, "hybrid_override_pattern": None}, 1, "lacks layer_types, which"),
    ],
)
def test_what_is_missing_is_named_in_one_line(tmp_path, keys, ranks, problem):
    with pytest.raises(SettingsError) as raised:
        read(tmp_path, keys, ranks)
    assert str(raised.value).startswith(f"{tmp_path / 'config.json'}: ")
    assert problem in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["missing", "bad", "deep", "a\0b"])
def test_a_file_that_cannot_be_read_is_one_line(tmp_path, name):
    (tmp_path / "bad").write_bytes(b'{"model_type": "\xff"}')
    (tmp_path / "deep").write_bytes(b'{"model_type":' * 100_000 + b"1" + b"}" * 100_000)
    with pytest.raises(SettingsError) as raised:
        read_model(tmp_path / name)
    assert "\n" not in str(raised.value)


def test_layers_may_be_listed_under_any_of_their_names(tmp_path):
    listed = ["linear_attention", "moe", "full_attention", "mamba", "mlp", "attention", "mamba"]
    keys = {**NEMOTRON_3_NANO, "hybrid_override_pattern": None, "layers_block_type": listed}
    model = read(tmp_path, keys)
    assert (model.state_layers, model.attention_layers) == (3, 2)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_int8_pool_takes_what_was_computed(tmp_path, name):
    """Against the pool itself, for the types of both engines."""
    torch = pytest.importorskip("torch")
    from statecache.checkpoint.pool import ActiveState, estimate_bytes

    model = read(tmp_path, PUBLISHED[name])
    for engine in ("sglang", "vllm"):
        for asked in (None, "float32", "bfloat16", "float16"):
            conv, temporal = (getattr(torch, dtype) for dtype in model.state_dtypes(engine, asked))
            shape = (model.state_layers, 1, *model.temporal)
            states = torch.empty(shape, dtype=temporal, device="meta")
            rows = torch.empty(
                (model.state_layers, 1, model.conv_values), dtype=conv, device="meta"
            )
            active = ActiveState(states, [rows])
            assert estimate_bytes(active, 1) == model.bytes_at_rest("int8", engine, asked)
            native = estimate_bytes(active, 1, mode="native")
            assert native == model.state_bytes(engine, asked)
