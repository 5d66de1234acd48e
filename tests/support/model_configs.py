"""Config files of hybrid models as published, shortened to what is read."""

import json
from pathlib import Path

from statecache.replay.prefix_tree import PrefixTree
from statecache.sizing.model_config import read_model
from statecache.sizing.splits import Demand, Split, rated_splits

QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_size": 2048,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "num_attention_heads": 16,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "torch_dtype": "bfloat16",
}
QWEN3_5 = {
    "model_type": "qwen3_5_moe",
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "text_config": {
        **{k: v for k, v in QWEN3_NEXT.items() if k not in ("architectures", "torch_dtype")},
        "model_type": "qwen3_5_moe_text",
        "dtype": "bfloat16",
        "mamba_ssm_dtype": "float32",
        "num_hidden_layers": 40,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 10,
    },
}
KIMI_LINEAR = {
    "model_type": "kimi_linear",
    "architectures": ["KimiLinearForCausalLM"],
    "dtype": "bfloat16",
    "hidden_size": 2304,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "linear_attn_config": {
        "kda_layers": [n for n in range(1, 27) if n % 4],
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "num_heads": 32,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
    },
}
NEMOTRON_3_NANO = {
    "model_type": "nemotron_h",
    "architectures": ["NemotronHForCausalLM"],
    "torch_dtype": "bfloat16",
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "num_hidden_layers": 52,
    "hidden_size": 2688,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
}
GRANITE_4_TINY = {
    "model_type": "granitemoehybrid",
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "torch_dtype": "bfloat16",
    "hidden_size": 1536,
    "num_hidden_layers": 40,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "layer_types": [*["mamba"] * 5, "attention", *["mamba"] * 4] * 4,
    "mamba_expand": 2,
    "mamba_n_heads": 48,
    "mamba_n_groups": 1,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
}
FALCON_H1_1_5B = {
    "model_type": "falcon_h1",
    "architectures": ["FalconH1ForCausalLM"],
    "torch_dtype": "bfloat16",
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_d_ssm": 3072,
    "mamba_expand": 2,
    "mamba_n_heads": 48,
    "mamba_n_groups": 1,
    "mamba_d_head": 64,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
}

PUBLISHED = {
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5": QWEN3_5,
    "kimi_linear": KIMI_LINEAR,
    "nemotron_h": NEMOTRON_3_NANO,
    "granite": GRANITE_4_TINY,
    "falcon_h1": FALCON_H1_1_5B,
}


def splits_of_qwen3_next(
    folder: Path, engine: str, state_dtype: str, draft_tokens: int = 0
) -> list[Split]:
    """What `statecache plan` makes of 20 GiB on two GPUs for one engine, from two requests."""
    (folder / "config.json").write_text(json.dumps(PUBLISHED["qwen3_next"]))
    demand = Demand(
        model=read_model(folder, 2),
        memory_bytes=20 * 2**30,
        engines=[engine],
        shares=[20],
        running=4,
        ranks=2,
        kv_dtype="fp8",
        state_dtype=state_dtype,
        block_tokens=64,
        draft_tokens=draft_tokens,
    )
    return list(rated_splits(demand, PrefixTree([-1, 0, 1], [[1, 2], [1, 2]], [0, 2])))
