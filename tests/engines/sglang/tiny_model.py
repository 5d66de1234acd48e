"""A tiny Qwen3-Next with random weights and a byte-level tokenizer, as a model folder."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3NextConfig, Qwen3NextForCausalLM

VOCABULARY = 320


def _save_tokenizer(folder: Path) -> None:
    words = {f"<{i}>": i for i in range(4)}
    for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet())):
        words[letter] = 4 + i
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<0>",
        bos_token="<1>",
        pad_token="<2>",
        unk_token="<3>",
    ).save_pretrained(folder)


def make_tiny_model(folder: Path, spread: float = 0.02) -> Path:
    """Three gated-delta layers and one attention layer; the same weights every time.

    They are as far apart as `spread` says: the more, the more a state decides what comes next.
    """
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=0,
        full_attention_interval=4,
        initializer_range=spread,
    )
    Qwen3NextForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    _save_tokenizer(folder)
    path = folder / "config.json"
    saved = json.loads(path.read_text())
    # SGLang 0.5.23 reads both from the top level (configs/qwen3_next.py).
    path.write_text(json.dumps(saved | {"full_attention_interval": 4, "rope_theta": 10000.0}))
    return folder
