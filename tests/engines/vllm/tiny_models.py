"""Tiny hybrid models with random weights and a byte-level tokenizer, as model folders.

vLLM's attention on a CPU takes blocks of 32 tokens and its gated-delta layers bfloat16.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

VOCABULARY = 512
_COMMON = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def _save_tokenizer(folder: Path) -> None:
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        words[letter] = len(words)
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(folder)


def _qwen3_next() -> torch.nn.Module:
    """Six gated-delta layers in three groups, two attention layers; sharded over at most two."""
    return Qwen3NextForCausalLM(
        Qwen3NextConfig(
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=128,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
            linear_conv_kernel_dim=4,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
            max_position_embeddings=8192,
            mlp_only_layers=[],
            layer_types=[*["linear_attention"] * 3, "full_attention"] * 2,
            tie_word_embeddings=False,
            **_COMMON,
        )
    )


def _granite() -> torch.nn.Module:
    """Three Mamba2 layers and one attention layer."""
    return GraniteMoeHybridForCausalLM(
        GraniteMoeHybridConfig(
            hidden_size=128,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=0,
            num_experts_per_tok=0,
            shared_intermediate_size=128,
            position_embedding_type="rope",
            mamba_n_heads=4,
            mamba_n_groups=1,
            mamba_d_state=64,
            mamba_d_head=64,
            mamba_d_conv=4,
            mamba_expand=2,
            mamba_chunk_size=64,
            max_position_embeddings=8192,
            layer_types=["mamba", "mamba", "mamba", "attention"],
            tie_word_embeddings=False,
            **_COMMON,
        )
    )


# The Mamba2 layers of vLLM 0.32 on a CPU fail where a state is exported from inside a chunk, so
# their chunks must not be longer than a block.
BLOCKS = {"qwen3_next": 32, "granite": 256}
MODELS = {"qwen3_next": _qwen3_next, "granite": _granite}


def make_tiny_model(name: str, folder: Path) -> Path:
    """Write the model `name` to `folder`; the same weights every time."""
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.copy_(torch.randn_like(parameter) * 0.08)
    model.to(torch.bfloat16).save_pretrained(folder)
    _save_tokenizer(folder)
    return folder
