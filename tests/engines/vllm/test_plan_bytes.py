"""`statecache plan` against vLLM: bytes of states and KV, block sizes, and the flags it names."""

import json
from types import SimpleNamespace

import pytest
import torch
from vllm.config import CacheConfig, ModelConfig, ParallelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.mamba.mamba_utils import (
    MambaStateDtypeCalculator,
    MambaStateShapeCalculator,
)
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec

from statecache.sizing.model_config import read_model
from statecache_vllm import adapter
from statecache_vllm.sizing import block_tokens
from support.model_configs import PUBLISHED, splits_of_qwen3_next

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


# The other two classes cannot be imported without torchvision, or without a GPU.
IMPORTED = [name for name in PUBLISHED if name not in ("kimi_linear", "qwen3_5")]


@pytest.fixture(scope="module", params=IMPORTED)
def known(request, tmp_path_factory):
    """A folder, what vLLM makes of its configuration, and its class of that model."""
    keys = PUBLISHED[request.param]
    path = tmp_path_factory.mktemp(request.param)
    (path / "config.json").write_text(json.dumps(keys))
    model = ModelConfig(model=str(path), skip_tokenizer_init=True)
    found, _ = ModelRegistry.resolve_model_cls(model.architecture, model_config=model)
    return path, model, found


def config_of(model, ranks, asked, drafts=0):
    """What vLLM would know on a GPU: a CPU keeps every state in fp32."""
    config = SimpleNamespace(
        model_config=model,
        parallel_config=ParallelConfig(tensor_parallel_size=ranks),
        cache_config=CacheConfig(mamba_ssm_cache_dtype=asked or "auto"),
        speculative_config=SimpleNamespace(num_speculative_tokens=drafts) if drafts else None,
        num_speculative_tokens=drafts,
    )
    adjust = MODELS_CONFIG_MAP.get(model.architecture)
    if adjust is not None:
        adjust.verify_and_update_config(config)
    return config


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("asked", [None, "float32", "bfloat16"])
@pytest.mark.parametrize("drafts", [0, 3])
def test_a_state_and_a_kv_token_take_what_vllm_takes(known, ranks, asked, drafts):
    folder, model, found = known
    config = config_of(model, ranks, asked, drafts)
    spec = MambaSpec(
        block_size=1,
        shapes=found.get_mamba_state_shape_from_config(config),
        dtypes=found.get_mamba_state_dtype_from_config(config),
    )
    ours = read_model(folder, ranks).widened(drafts)
    conv, temporal = ours.state_dtypes("vllm", asked)
    assert spec.dtypes == (DTYPES[conv], DTYPES[temporal])
    assert spec.shapes[1] == ours.temporal
    assert ours.layer_state_bytes("vllm", asked) == spec.page_size_bytes
    block = FullAttentionSpec(
        block_size=16,
        num_kv_heads=model.get_num_kv_heads(config.parallel_config),
        head_size=model.get_head_size(),
        dtype=model.dtype,
    )
    kinds = model.hf_text_config.layer_types
    layers = sum(kind in ("full_attention", "attention", "hybrid") for kind in kinds)
    assert ours.kv_token_bytes() * 16 == layers * block.page_size_bytes
    states = sum(kind in ("linear_attention", "mamba", "hybrid") for kind in kinds)
    assert ours.state_layers == states


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("named", ["float32", None])
def test_qwen3_5_takes_what_vllm_takes(tmp_path, ranks, named):
    """The functions that its class calls, called alike, after vLLM adjusted its configuration."""
    text = {**PUBLISHED["qwen3_5"]["text_config"], "mamba_ssm_dtype": named}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "qwen3_5", "text_config": text})
    )
    model = SimpleNamespace(
        architecture="Qwen3_5MoeForConditionalGeneration",
        dtype=torch.bfloat16,
        hf_text_config=SimpleNamespace(**text),
    )
    cache = config_of(model, ranks, None).cache_config
    shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(
        ranks,
        text["linear_num_key_heads"],
        text["linear_num_value_heads"],
        text["linear_key_head_dim"],
        text["linear_value_head_dim"],
        text["linear_conv_kernel_dim"],
    )
    dtypes = MambaStateDtypeCalculator.gated_delta_net_state_dtype(
        model.dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype
    )
    spec = MambaSpec(block_size=1, shapes=shapes, dtypes=dtypes)
    assert read_model(tmp_path, ranks).layer_state_bytes("vllm") == spec.page_size_bytes


@pytest.mark.parametrize("ranks", [1, 2])
def test_kimi_linear_takes_what_vllm_takes(tmp_path, ranks):
    """Its class cannot be imported without a GPU: the functions that it calls, called alike."""
    keys = PUBLISHED["kimi_linear"]
    (tmp_path / "config.json").write_text(json.dumps(keys))
    linear = keys["linear_attn_config"]
    shapes = MambaStateShapeCalculator.kda_state_shape(
        ranks,
        linear["num_heads"],
        linear["head_dim"],
        conv_kernel_size=linear["short_conv_kernel_size"],
    )
    dtypes = MambaStateDtypeCalculator.kda_state_dtype(torch.bfloat16, "auto", "auto")
    spec = MambaSpec(block_size=1, shapes=shapes, dtypes=dtypes)
    latent = MLAAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=512 + 64, dtype=torch.bfloat16
    )
    ours = read_model(tmp_path, ranks)
    assert ours.layer_state_bytes("vllm") == spec.page_size_bytes
    assert ours.kv_token_bytes() * 16 == 7 * latent.page_size_bytes


def test_the_block_is_as_large_as_vllm_makes_it(model):
    """The tiny model of the tests, whose states a CPU keeps in fp32 and whose blocks are of 32.

    A layer: 4 x 64 x 64 values of 4 bytes and 3 x 512 of 2; KV: 2 x 4 x 128 of 2. 34 tokens.
    """
    config = EngineArgs(
        model=str(model), dtype="bfloat16", additional_config={"kv_cache_plugin": "statecache"}
    ).create_engine_config()
    ours = read_model(model)
    assert ours.layer_state_bytes("vllm", "float32") == 68_608
    assert block_tokens(ours, 32, None, "float32") == 64
    least = config.cache_config.block_size
    assert least == block_tokens(ours, least, None, "float32")


@pytest.mark.parametrize("drafts", [0, 3])
def test_vllm_knows_the_flags_that_are_named(tmp_path, drafts):
    adapter.register()
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    splits = splits_of_qwen3_next(tmp_path, "vllm", "float32", drafts)
    assert [split.states for split in splits] == ["shared", "native", "int8"]
    for split in splits:
        found = parser.parse_args(" ".join(split.flags).split())
        assert (found.max_num_seqs, found.tensor_parallel_size, found.block_size) == (4, 2, 64)
        assert (found.kv_cache_dtype, found.mamba_ssm_cache_dtype) == ("fp8", "float32")
        assert (found.spec_method, found.spec_tokens) == (("mtp", 3) if drafts else (None, None))
        assert found.kv_cache_plugin == "statecache"
        kept = None if split.kept_slots is None else f"{split.kept_slots}"
        assert found.statecache_checkpoint_slots == kept
        assert (found.statecache_checkpoints or "shared") == split.states
