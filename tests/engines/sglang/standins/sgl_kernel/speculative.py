"""What `sgl_kernel`'s CPU build has for drafts that form a chain, in plain torch."""

import torch

_NONE = -1


def _chain(width):
    """Of each node of a chain: the one that follows it."""
    return torch.tensor([*range(1, width), _NONE])


def build_tree_kernel_efficient_cpu(
    parent_list,  # noqa: ARG001
    top_scores_index,  # noqa: ARG001
    seq_lens,
    tree_mask,  # [requests * width * width], updated in place as all below
    positions,
    retrieve_index,
    retrieve_next_token,
    retrieve_next_sibling,
    topk,
    spec_steps,
    num_verify_tokens,
    tree_mask_mode,  # noqa: ARG001
):
    requests, width = len(seq_lens), num_verify_tokens
    if topk != 1 or width != spec_steps + 1:
        raise NotImplementedError("the stand-in builds chains, not trees")
    tree_mask.view(requests, width, width)[:] = torch.ones(width, width).tril().bool()
    positions.view(requests, width)[:] = seq_lens[:, None] + torch.arange(width)
    retrieve_index[:] = torch.arange(requests * width).view(requests, width)
    retrieve_next_token[:] = _chain(width)
    retrieve_next_sibling[:] = _NONE


def reconstruct_indices_from_tree_mask(
    tree_mask,
    verified_seq_len,
    positions,
    retrieve_index,
    retrieve_next_token,
    retrieve_next_sibling,
    batch_size,
    draft_token_num,
):
    width = draft_token_num
    chains = torch.ones(batch_size, width, width).tril().bool()
    if not torch.equal(tree_mask.view(batch_size, width, width), chains):
        raise NotImplementedError("the stand-in verifies chains, not trees")
    build_tree_kernel_efficient_cpu(
        None,
        None,
        verified_seq_len,
        tree_mask,
        positions,
        retrieve_index,
        retrieve_next_token,
        retrieve_next_sibling,
        1,
        width - 1,
        width,
        None,
    )


def verify_tree_greedy_cpu(
    predicts,  # [requests * width], updated in place as the two that follow
    accept_index,  # [requests, depth]
    accept_token_num,  # [requests]
    candidates,  # [requests, width]: the last token, then the drafts
    retrive_index,
    retrive_next_token,  # noqa: ARG001
    retrive_next_sibling,  # noqa: ARG001
    target_predict,  # [requests, width]: what the model says after each of them
):
    for row, (said, drafted) in enumerate(
        zip(target_predict.tolist(), candidates[:, 1:].tolist(), strict=True)
    ):
        right = [a == b for a, b in zip(said, drafted, strict=False)]
        kept = [*right, False].index(False)
        nodes = retrive_index[row, : kept + 1]
        accept_index[row, : kept + 1] = nodes.to(accept_index.dtype)
        predicts[nodes] = target_predict[row, : kept + 1].to(predicts.dtype)
        accept_token_num[row] = kept


def _windows(req_pool_indices, req_to_token, start_offset, end_offset):
    """The slots of each request's tokens from one to the other, as a part of the table."""
    bounds = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    return [req_to_token[row, start:end] for row, start, end in bounds]


def assign_extend_cache_locs_cpu(
    req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, _pool_len
):
    slots = torch.cat(_windows(req_pool_indices, req_to_token, start_offset, end_offset))
    out_cache_loc[: len(slots)] = slots.to(out_cache_loc.dtype)


def assign_req_to_token_pool_cpu(
    req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, _pool_len
):
    windows = _windows(req_pool_indices, req_to_token, start_offset, end_offset)
    given = out_cache_loc.split([len(window) for window in windows])
    for window, slots in zip(windows, given, strict=True):
        window[:] = slots.to(window.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices, req_to_token, seq_lens, out_cache_loc, pool_len, topk, columns
):
    ends = seq_lens + topk * columns
    assign_extend_cache_locs_cpu(
        req_pool_indices, req_to_token, seq_lens, ends, out_cache_loc, pool_len
    )


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, accept_stride):
    ends = torch.arange(len(accept_lens)) * accept_stride + accept_lens - 1
    bonus_tokens[:] = accept_tokens.reshape(-1)[ends].to(bonus_tokens.dtype)


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc):
    kept = out_cache_loc[accept_index[accept_index >= 0].long()]
    accept_out_cache_loc[: len(kept)] = kept


def copy_all_layer_kv_cache_cpu(*_args, **_kwargs):
    """SGLang calls it to warm it up. What a chain accepted is where it belongs."""
