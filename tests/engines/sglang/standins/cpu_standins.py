"""Plain torch in place of the Triton kernels a tiny Qwen3-Next needs, through SGLang's hooks."""

import torch
import torch.nn.functional as F  # noqa: N812

_OPS = "sglang.kernels.ops"


def gated_rms_norm(self, x, z=None, *_args, **_kwargs):
    gate_last = getattr(self, "norm_before_gate", True)
    wide = x.float()
    if z is not None and not gate_last:
        wide = wide * F.silu(z.float())
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight.float()
    if z is not None and gate_last:
        wide = wide * F.silu(z.float())
    return wide.to(x.dtype)


def shared_expert_gate(hidden_states, gate_weight, shared_output, output, *, do_add):
    gate = torch.sigmoid((hidden_states.float() @ gate_weight.float())[:, None])
    gated = gate * shared_output.float()
    output.copy_((output.float() + gated if do_add else gated).to(output.dtype))


def host_copies(*_args, **_kwargs):
    import host_copies as copies

    copies.install()


def drafting(*_args, **_kwargs):
    import drafting as drafts

    drafts.install()


def install():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, plain in {
        f"{_OPS}.attention.fla.layernorm_gated.RMSNorm.forward": gated_rms_norm,
        f"{_OPS}.attention.fla.fused_norm_gate.FusedRMSNormGated.forward": gated_rms_norm,
        f"{_OPS}.elementwise.elementwise._launch_fused_gate_sigmoid_mul": shared_expert_gate,
    }.items():
        HookRegistry.register(target, plain, HookType.REPLACE)
    cache = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
    HookRegistry.register(f"{cache}.init_hicache", host_copies, HookType.BEFORE)
    algorithm = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm"
    HookRegistry.register(f"{algorithm}.create_worker", drafting, HookType.BEFORE)
