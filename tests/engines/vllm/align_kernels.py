"""The two Triton kernels that vLLM 0.32 lacks on a CPU for drafts beside cached states.

Both copy states between the blocks of a request, whose numbers are in tables on the device. They
are loops here, over the addresses that vLLM hands to its kernels.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple


class _Layout(NamedTuple):
    """Where the states lie: by tensor, but for the tables of block numbers, which are by group."""

    tables: Any
    table_stride: int
    bases: Any
    block_bytes: Any
    item_bytes: Any
    items: Any  # of one token in a convolution's state, or of a temporal state
    widths: Any  # tokens of a convolution's state, 0 for a temporal one
    groups: Any
    rows: Any  # of a convolution's state that has its tokens last
    row_bytes: Any

    def copy(
        self, request: int, source: int, target: int, further: int, *, tokens_last: bool
    ) -> None:
        """Copy the state after `further` accepted tokens from column `source` to `target`."""
        for tensor in range(self.bases.numel()):
            table = int(self.tables[int(self.groups[tensor])]) + 4 * request * self.table_stride
            width, size = int(self.widths[tensor]), int(self.item_bytes[tensor])
            to = self._address(tensor, table, target)
            if not width:
                at = self._address(tensor, table, source + further)
                if at != to:
                    ctypes.memmove(to, at, int(self.items[tensor]) * size)
                continue
            at = self._address(tensor, table, source)
            if tokens_last:
                for row in range(int(self.rows[tensor])):
                    begin = row * int(self.row_bytes[tensor])
                    left = (width - further) * size
                    ctypes.memmove(to + begin, at + begin + further * size, left)
            else:
                token = int(self.items[tensor]) * size
                ctypes.memmove(to, at + further * token, (width - further) * token)

    def _address(self, tensor: int, table: int, column: int) -> int:
        number = ctypes.c_int32.from_address(table + 4 * column).value
        return int(self.bases[tensor]) + number * int(self.block_bytes[tensor])


def _requests(count: int, mapping: Any) -> Any:
    """The rows of a batch, as requests; those that are none of the step's are left out."""
    rows = range(count) if mapping is None else [int(mapping[row]) for row in range(count)]
    return (request for request in rows if request >= 0)


def _before_forward(
    columns: Any,
    sources: Any,
    further: Any,
    *args: Any,
    **constants: Any,
) -> None:
    """`precopy_mamba_align_fused_kernel`: the last accepted state to the running column."""
    layout, (mapping, count) = _Layout(*args[:-2]), args[-2:]
    for request in _requests(count, mapping if constants["HAS_IDX_MAPPING"] else None):
        source, target = int(sources[request]), int(columns[request])
        if source >= 0 and source != target:
            more = int(further[request])
            layout.copy(
                request, source, target, more, tokens_last=constants["CONV_STATE_DIM_FIRST"]
            )


def _after_sampling(
    accepted: Any,
    columns: Any,
    scheduled: Any,
    computed: Any,
    drafts: Any,
    *args: Any,
    block_size: int,
    **constants: Any,
) -> None:
    """`postprocess_mamba_fused_kernel`: the state at a block's end to the column of that block."""
    layout, (accepted_now, mapping, count) = _Layout(*args[:-3]), args[-3:]
    for request in _requests(count, mapping):
        column, kept = int(columns[request]), int(accepted[request])
        running = int(computed[request]) + int(scheduled[request]) - int(drafts[request])
        end = (running + kept - 1) // block_size * block_size
        if end < running:
            continue
        target = end // block_size - 1
        if target == column:
            accepted_now[request] = 1
        if target != column or end != running:
            more = end - running
            layout.copy(
                request, column, target, more, tokens_last=constants["CONV_STATE_DIM_FIRST"]
            )


def install() -> None:
    """Put both into the place of vLLM's; stays for the process."""
    from vllm.triton_utils.dispatcher import KernelOverride
    from vllm.v1.worker import mamba_utils

    if not isinstance(mamba_utils.precopy_mamba_align_fused_kernel, KernelOverride):
        mamba_utils.precopy_mamba_align_fused_kernel = KernelOverride(
            mamba_utils.precopy_mamba_align_fused_kernel, _before_forward
        )
        mamba_utils.postprocess_mamba_fused_kernel = KernelOverride(
            mamba_utils.postprocess_mamba_fused_kernel, _after_sampling
        )
