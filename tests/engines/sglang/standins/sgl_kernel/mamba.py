"""SGLang imports these from here."""

from sgl_kernel import (  # noqa: F401
    __getattr__,
    causal_conv1d_fn_cpu,
    causal_conv1d_update_cpu,
    chunk_gated_delta_rule_cpu,
)
