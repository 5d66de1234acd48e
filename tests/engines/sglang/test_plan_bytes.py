"""`statecache plan` against SGLang: bytes of states and KV, and the flags it names."""

import argparse
import json

import pytest
from sglang.srt.configs.falcon_h1 import FalconH1Config
from sglang.srt.configs.granitemoehybrid import GraniteMoeHybridConfig
from sglang.srt.configs.kimi_linear import KimiLinearConfig
from sglang.srt.configs.nemotron_h import NemotronHConfig
from sglang.srt.configs.qwen3_5 import Qwen3_5MoeTextConfig
from sglang.srt.configs.qwen3_next import Qwen3NextConfig
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs

from statecache.engine.settings import add_flags
from statecache.sizing.model_config import read_model
from statecache_sglang.spec import SPEC
from support.model_configs import PUBLISHED, splits_of_qwen3_next

CLASSES = {
    "qwen3_next": Qwen3NextConfig,
    "qwen3_5": Qwen3_5MoeTextConfig,
    "kimi_linear": KimiLinearConfig,
    "nemotron_h": NemotronHConfig,
    "granite": GraniteMoeHybridConfig,
    "falcon_h1": FalconH1Config,
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("asked", [None, "bfloat16"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_state_takes_what_sglang_takes(tmp_path, name, ranks, asked):
    keys = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(keys))
    config = CLASSES[name](**keys.get("text_config", keys))
    sizes = {"tp_size": ranks, "attn_tp_size": ranks, "enable_cp_tp_group_sharing": False}
    sizes |= {"moe_tp_size": ranks, "moe_ep_size": 1, "moe_dp_size": 1}
    with get_parallel().override(**sizes), envs.SGLANG_MAMBA_SSM_DTYPE.override(asked):
        params = config.mamba2_cache_params
        taken = params.mamba_cache_per_req
    ours = read_model(tmp_path, ranks)
    assert ours.state_layers == len(params.layers)
    assert ours.attention_layers == len(config.full_attention_layer_ids)
    assert ours.temporal == params.shape.temporal
    assert ours.state_bytes("sglang", asked) == taken


@pytest.mark.parametrize("drafts", [0, 3])
def test_sglang_knows_the_flags_that_are_named(tmp_path, drafts):
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    add_flags(parser, SPEC)
    splits = splits_of_qwen3_next(tmp_path, "sglang", "bfloat16", drafts)
    assert [split.states for split in splits] == ["native", "int8"]
    for split in splits:
        words = ["--model-path", "m", *" ".join(split.flags).split()]
        found = parser.parse_args(words)
        assert (found.max_running_requests, found.tp_size, found.page_size) == (4, 2, 64)
        assert (found.kv_cache_dtype, found.mamba_ssm_dtype) == ("fp8_e4m3", "bfloat16")
        assert found.speculative_num_draft_tokens == (drafts + 1 if drafts else None)
        int8 = split.states == "int8"
        assert found.statecache_checkpoint_slots == (f"{split.kept_slots}" if int8 else None)
        assert found.max_mamba_cache_size == 20 + (0 if int8 else split.kept_slots)
