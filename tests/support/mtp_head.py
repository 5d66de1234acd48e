"""An MTP head for a tiny `qwen3_next` model folder, which is right as often as a test wants."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def add_drafter(folder: Path, noise: float = 1.0, *, right: bool = True) -> Path:
    """Give a `qwen3_next` an MTP head, and each token one that follows it.

    The head drafts that one, or if it is not to be `right` the least likely one of all. What the
    layers of the model add to it is scaled by `noise`: with 1.0 the model goes on as the head says,
    with 4.0 about one time in five.
    """
    path = folder / "model.safetensors"
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(path)
    words, size = weights["lm_head.weight"].shape
    last = f"model.layers.{config['num_hidden_layers'] - 1}."
    weights |= {
        f"mtp.layers.0.{name.removeprefix(last)}": weights[name].clone()
        for name in list(weights)
        if name.startswith(last)
    }
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        weights[f"mtp.{name}.weight"] = torch.zeros(size, dtype=torch.bfloat16)
    torch.manual_seed(7)
    tokens = torch.randn(words, size)
    follows = torch.tensor([t // 16 * 16 + (t + 1) % 16 for t in range(words)])
    head = torch.zeros(words, size)
    head[follows] = tokens
    weights["model.embed_tokens.weight"] = tokens.to(torch.bfloat16)
    weights["lm_head.weight"] = (0.2 * head).to(torch.bfloat16)
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            weights[name] = (weight.float() * noise).to(torch.bfloat16)
    embedding = torch.eye(size) if right else -torch.eye(size)
    weights["mtp.fc.weight"] = torch.cat([embedding, torch.zeros(size, size)], 1).to(torch.bfloat16)
    save_file(weights, path, metadata={"format": "pt"})
    config["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    return folder
