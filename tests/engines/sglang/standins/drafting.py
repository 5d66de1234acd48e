"""Attention and states of a verify step on a CPU, in plain torch; a chain of drafts, no tree.

A draft is computed as the token of a decode step would be, one after the other: what is accepted
is what SGLang says without a drafter.
"""

import copy

import torch


def _later(forward_batch, tokens):
    """The same batch when each request has so many more tokens of KV."""
    later = copy.copy(forward_batch)
    later.seq_lens = forward_batch.seq_lens + tokens
    return later


def verify_attention(original, self, q, k, v, layer, forward_batch, save_kv_cache=True, **given):
    """Around `TorchNativeAttnBackend.forward_extend`, which knows no verify step."""
    if not forward_batch.forward_mode.is_target_verify():
        return original(self, q, k, v, layer, forward_batch, save_kv_cache, **given)
    width = forward_batch.spec_info.draft_token_num
    out = q.new_empty((q.shape[0], layer.tp_q_head_num * layer.v_head_dim))
    slots = forward_batch.out_cache_loc
    for step in range(width):
        now = _later(forward_batch, step + 1)
        now.out_cache_loc = slots[step::width]
        own = slice(step, None, width)
        out[own] = self.forward_decode(q[own], k[own], v[own], layer, now, save_kv_cache)
    return out


class DraftSteps:
    """A backend for each draft but the first, which comes with the tokens before it."""

    def __init__(self, backends):
        self.attn_backends = backends

    def init_forward_metadata(self, _forward_batch):
        """Nothing is prepared."""


def decode_backend(factory):
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    class OfStep(TorchNativeAttnBackend):
        """A draft sees the tokens before it and the drafts up to itself."""

        ahead = 0

        def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True):
            now = _later(forward_batch, self.ahead)
            return super().forward_decode(q, k, v, layer, now, save_kv_cache)

    backends = [
        OfStep(factory.draft_model_runner) for _ in range(factory.speculative_num_steps - 1)
    ]
    for step, backend in enumerate(backends):
        backend.ahead = step + 1
    return DraftSteps(backends) if backends else None


def extend_backend(factory):
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    return TorchNativeAttnBackend(factory.draft_model_runner)


def scatter_states(
    states, slots, last_steps, tracked_slots=None, tracked_steps=None, src_indices_raw=None
):
    """Bring the state after the accepted step, and one at a boundary, to the slots of requests."""
    if src_indices_raw is not None:
        raise NotImplementedError("the stand-in knows no pipeline stages")
    pairs = [(states.temporal, states.intermediate_ssm)]
    pairs += zip(states.conv, states.intermediate_conv_window, strict=True)
    for targets, steps in ((slots, last_steps), (tracked_slots, tracked_steps)):
        if targets is None:
            continue
        for row, (slot, step) in enumerate(zip(targets.tolist(), steps.tolist(), strict=True)):
            for kept, drafted in pairs if step >= 0 else ():
                kept[:, slot] = drafted[:, row, step].to(kept.dtype)


def install():
    """Put them in place, for this process."""
    from sglang.srt.layers.attention import hybrid_linear_attn_backend as hybrid
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    original = TorchNativeAttnBackend.forward_extend
    TorchNativeAttnBackend.forward_extend = lambda *given, **more: verify_attention(
        original, *given, **more
    )
    DraftBackendFactory.create_decode_backend = decode_backend
    DraftBackendFactory.create_draft_extend_backend = extend_backend
    hybrid.scatter_mamba_states_after_mtp_verify = scatter_states
    torch.cuda.synchronize = lambda *_device: None  # Qwen3-Next's MTP calls it on any device
