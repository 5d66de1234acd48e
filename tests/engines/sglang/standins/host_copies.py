"""Plain torch in place of the copies between the device and the host pools of SGLang's HiCache.

On a CPU "device" and host are the same memory. Everything else of HiCache runs as it is: pools,
controller, acknowledgements.
"""

from sglang.srt.mem_cache.pool_host import common, mamba, mha


def layers_to_pages(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size):
    """`transfer_kv_all_layer_direct_lf_pf`: from device layers to one page-first host buffer."""
    assert page_size == 1
    per_buffer = len(src_ptrs) // len(dst_ptrs)
    for number, source in enumerate(src_ptrs):
        buffer, layer = dst_ptrs[number // per_buffer], number % per_buffer
        rows = source[src_indices]
        buffer[dst_indices, layer] = rows.view(len(rows), *buffer.shape[2:])


def page_to_layer(src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size):
    """`transfer_kv_per_layer_direct_pf_lf`: back to one device layer."""
    assert page_size == 1
    for buffer, layer in zip(src_ptrs, dst_ptrs, strict=True):
        rows = buffer[src_indices, layer_id]
        layer[dst_indices] = rows.reshape(len(rows), *layer.shape[1:])


def _plain_memory(dims, *, dtype, device, allocator, **_pinning):
    return allocator.allocate(dims, dtype=dtype, device=device)


def install():
    """Put the copies and plain memory in place, for this process."""
    for module in (mamba, mha):
        module.transfer_kv_all_layer_direct_lf_pf = layers_to_pages
        module.transfer_kv_per_layer_direct_pf_lf = page_to_layer
    common.ALLOC_MEMORY_FUNCS["cpu"] = _plain_memory
