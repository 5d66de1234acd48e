"""The gated delta rule of `sgl_kernel`'s CPU build in plain torch; anything else raises."""

import itertools

import torch
import torch.nn.functional as F  # noqa: N812

from sgl_kernel.speculative import (  # noqa: F401
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_tree_kernel_efficient_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    verify_tree_greedy_cpu,
)

__version__ = "0.0.0+standin"


def _missing(name):
    def raises(*_args, **_kwargs):
        raise NotImplementedError(f"the stand-in of sgl_kernel has no {name}")

    raises.__name__ = name
    return raises


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _missing(name)


def _activate(x, activation):
    return F.silu(x) if activation in ("silu", "swish", True) else x


def causal_conv1d_fn_cpu(
    x,  # [channels, tokens]
    weight,  # [channels, width]
    bias,
    activation=None,
    conv_states=None,  # [slots, channels, width - 1], updated in place
    has_initial_state=None,
    cache_indices=None,
    query_start_loc=None,
    seq_lens_cpu=None,  # noqa: ARG001
    **_kwargs,
):
    out = torch.empty_like(x)
    kept = weight.shape[-1] - 1
    bounds = query_start_loc.tolist()
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        if end <= start:
            continue
        slot = int(cache_indices[i])
        before = conv_states[slot][:, -kept:]
        if not bool(has_initial_state[i]):
            before = torch.zeros_like(before)
        padded = torch.cat([before.to(x.dtype), x[:, start:end]], 1)
        wide_bias = None if bias is None else bias.float()
        y = F.conv1d(padded.float()[None], weight.float()[:, None], wide_bias, groups=x.shape[0])
        out[:, start:end] = _activate(y[0], activation).to(x.dtype)
        conv_states[slot] = padded[:, -kept:].to(conv_states.dtype)
    return out


def causal_conv1d_update_cpu(
    x,  # [requests, channels], or with drafts [requests, channels, tokens]
    conv_state,
    weight,
    bias=None,
    activation=None,
    conv_state_indices=None,
    intermediate_conv_window=None,  # [rows, tokens, channels, width - 1]: the state after each
    intermediate_state_indices=None,
    **_kwargs,
):
    slots = conv_state_indices.long()
    if intermediate_conv_window is None:
        padded = torch.cat([conv_state[slots].to(x.dtype), x[..., None]], -1)
        conv_state[slots] = padded[..., 1:].to(conv_state.dtype)
        return _convolve_last(padded, weight, bias, activation)
    out, rows, state = torch.empty_like(x), intermediate_state_indices.long(), conv_state[slots]
    for token in range(x.shape[-1]):
        padded = torch.cat([state.to(x.dtype), x[..., token, None]], -1)
        state = padded[..., 1:].to(conv_state.dtype)
        intermediate_conv_window[rows, token] = state.to(intermediate_conv_window.dtype)
        out[..., token] = _convolve_last(padded, weight, bias, activation)
    return out


def _convolve_last(padded, weight, bias, activation):
    y = (padded[..., -weight.shape[-1] :].float() * weight.float()[None]).sum(-1)
    if bias is not None:
        y = y + bias.float()
    return _activate(y, activation).to(padded.dtype)


def fused_gdn_gating_cpu(A_log, a, b, dt_bias):  # noqa: N803
    decay = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def _unit(x):
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _delta_rule(q, k, v, decay, beta, state):
    q = _unit(q.float()) * q.shape[-1] ** -0.5
    k = _unit(k.float())
    v = v.float()
    out = torch.empty_like(v)
    for t in range(q.shape[0]):
        state = state * decay[t].exp()[:, None, None]
        new = (v[t] - torch.einsum("hvk,hk->hv", state, k[t])) * beta[t][:, None]
        state = state + new[:, :, None] * k[t][:, None, :]
        out[t] = torch.einsum("hvk,hk->hv", state, q[t])
    return out, state


def chunk_gated_delta_rule_cpu(
    q, k, v, g, beta, initial_state=None, cu_seqlens=None, initial_state_indices=None, **_kwargs
):
    repeats = v.shape[2] // q.shape[2]
    q = q[0].repeat_interleave(repeats, 1)
    k = k[0].repeat_interleave(repeats, 1)
    out = torch.zeros_like(v)
    bounds = cu_seqlens.tolist()
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        if end <= start:
            continue
        slot, span = int(initial_state_indices[i]), slice(start, end)
        y, state = _delta_rule(
            q[span], k[span], v[0, span], g[0, span], beta[0, span], initial_state[slot].float()
        )
        out[0, span] = y.to(out.dtype)
        initial_state[slot] = state.to(initial_state.dtype)
    return out, None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log,  # noqa: N803
    dt_bias,
    q,
    k,
    v,
    a,
    b,
    initial_state_source,
    initial_state_indices,
    cu_seqlens,
    intermediate_states_buffer=None,  # [rows, tokens, ...]: the state after each token
    intermediate_state_indices=None,
    **_kwargs,
):
    """With a buffer nothing else is written: what is kept is decided once drafts are accepted."""
    decay, beta = fused_gdn_gating_cpu(
        A_log, a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1]), dt_bias
    )

    def update(tokens, states, slots, bounds):
        parts = (part[:, tokens] for part in (q, k, v, decay, beta))
        return chunk_gated_delta_rule_cpu(*parts, states, bounds, initial_state_indices=slots)[0]

    if intermediate_states_buffer is None:
        return update(slice(None), initial_state_source, initial_state_indices, cu_seqlens)
    out, requests = torch.zeros_like(v), len(cu_seqlens) - 1
    width, every = v.shape[1] // requests, torch.arange(requests)
    states = initial_state_source[initial_state_indices[:requests].long()]
    for token in range(width):
        own = slice(token, None, width)
        out[:, own] = update(own, states, every, torch.arange(requests + 1))
        rows = intermediate_state_indices[:requests].long()
        intermediate_states_buffer[rows, token] = states.to(intermediate_states_buffer.dtype)
    return out


torch.ops.sgl_kernel.fused_gdn_gating_cpu = fused_gdn_gating_cpu
torch.ops.sgl_kernel.fused_sigmoid_gating_delta_rule_update_cpu = (
    fused_sigmoid_gating_delta_rule_update_cpu
)
for _name in ("fused_sigmoid_mul_cpu", "fused_moe_router_cpu"):
    setattr(torch.ops.sgl_kernel, _name, _missing(_name))
