"""Speculative decoding over the real cache layer: SGLang's scheduling, tracking and results.

No model runs: a verify step accepts a random number of drafts and writes, for every draft, the mark
of the state there into SGLang's own buffer of intermediate states. Which of them is kept, where it
goes, what a request's end is and what is cached of it is all SGLang's, or the plugin's. Only the
scatter, a kernel for GPUs, has a stand-in here. Each state says of which tokens it is, and every
reuse is compared.
"""

from __future__ import annotations

import random
import zlib
from array import array
from types import SimpleNamespace

import torch
from cache_layer import Traffic
from schedule_loop import Loop
from scheduled import adder, request
from sglang.srt.managers.schedule_batch import (
    Req,
    ScheduleBatch,
    release_req,
    set_mamba_track_indices_from_reqs,
)
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.runtime_context import get_exec, mamba_track_grid
from sglang.srt.speculative import spec_utils
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from speculative_parts import DRAFTS, result_processor

STOP = 3


class Tokens:
    """The tokens of one request as the device knows them, and the sum of each of its prefixes."""

    def __init__(self, req: Req):
        self.sums = [zlib.crc32(repr((req.extra_key, req.cache_salt)).encode())]
        self.ids = array("q")
        self.extend(req.full_untruncated_fill_ids)

    def extend(self, tokens) -> None:
        for token in tokens:
            self.ids.append(token)
            self.sums.append(_after(self.sums[-1], token))


def _after(total: int, token: int) -> int:
    return zlib.crc32(int(token).to_bytes(8, "little"), total)


def mark(sums: list[int], tokens: int) -> list[int]:
    """A convolution's window at the end of so many tokens: a number of each of the last three.

    The windows of a step's drafts lie over each other in SGLang's buffer on a GPU, so each number
    is its own position's: of all tokens until there, and one that bfloat16 holds exactly.
    """
    return [sums[max(at, 0)] % 251 for at in range(tokens - 2, tokens + 1)]


class SpeculativeLoop(Loop):
    """One scheduler; with the extra buffer a step is launched before the last one's result.

    `wrong` counts the states that were reused and were not those of their tokens, of `compared`.
    """

    def __init__(
        self,
        traffic: Traffic,
        rng: random.Random,
        chunk: int = 8_192,
        mixed: bool = False,
        drafter: bool = True,
    ):
        extra = traffic.cache.enable_mamba_extra_buffer
        super().__init__(traffic, chunk, overlap=extra)
        self.rng = rng
        self.mixed = mixed  # --enable-mixed-chunk
        self.drafter = drafter  # without one a step decodes one token, and verifies nothing
        self.running: list[Req] = []
        self.tokens: dict[str, Tokens] = {}
        self.wrong = self.compared = self.reused = self.prompts = 0
        self.drafted = self.accepted = self.retracted = 0
        self.served: list[Req] = []
        self.retractions = 0.0  # share of the steps in which one request is retracted for nothing
        self.acceptance = lambda: rng.randint(1, DRAFTS)
        self.processor = result_processor(traffic, overlap=extra)
        self.model = SimpleNamespace(hf_text_config=SimpleNamespace(mamba_chunk_size=64))

    def ask(self, tokens: list[int], most: int, **more: str) -> Req:
        made = request(tokens, **more)
        made.sampling_params.max_new_tokens = most
        made.sampling_params.stop_token_ids = {STOP}
        self.queue.append(made)
        return made

    def run(self, most: int = 100_000) -> None:
        while self.queue or self.chunked or self.running or self.in_flight:
            self.step()
            assert self.steps < most, "the loop does not end"

    def step(self) -> list[Req]:
        self.steps += 1
        batch = self._next_batch()
        step = self._prefill(batch) if batch else self._next_tokens()
        if step is not None:
            self.in_flight.append(step)
        while len(self.in_flight) > (self.late if step is not None else 0):
            self._take(*self.in_flight.pop(0))
        return batch

    def _adder(self):
        return adder(self.traffic, self.chunk, page_size=self.traffic.cache.page_size)

    # Prefill.

    def _prefill(self, reqs: list[Req]):
        for req in reqs:
            self._compute(req)
        if self.chunked is not None and self.chunked in reqs:
            self.chunked.inflight_middle_chunks += 1
        tails = self._ready() if self.mixed else []
        sampled = []
        for req in reqs:
            through = req.extend_end >= len(req.full_untruncated_fill_ids)
            token = self._draw() if through and req is not self.chunked else 0
            sampled.append(token)
            if token:
                self.tokens[req.rid].extend([token])
                if self.late:
                    self.running.append(req)
        for req in tails:
            # As `ScheduleBatch.mix_with_running`: the last token known is computed, no draft is.
            self._write(req.kv.mamba_pool_idx, req, len(self.tokens[req.rid].ids))
            sampled.append(self._draw())
            self.tokens[req.rid].extend(sampled[-1:])
        batch = self._batch([*reqs, *tails], ForwardMode.EXTEND)
        batch.decoding_reqs = tails
        return batch, GenerationBatchResult(next_token_ids=torch.tensor(sampled))

    def _compute(self, req: Req) -> None:
        begin, end, kv = req.prefix_len, req.extend_end, req.kv
        if not kv.holds_kv:
            self._admit(req)
        elif begin:
            self._compare(kv.mamba_pool_idx, req, begin)
        self._reserve(req, end)
        kv.kv_committed_len = end
        if self.late:
            entry = ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend(self._self(), req)
            if entry.track_mask:
                tracked = getattr(entry, "track_index", None)  # SGLang 0.5.22
                if tracked is None:
                    tracked = kv.mamba_ping_pong_track_buffer[entry.track_position]
                self._write(tracked, req, kv.mamba_last_track_seqlen)
        self._write(kv.mamba_pool_idx, req, end)

    def _admit(self, req: Req) -> None:
        traffic, kv, begin = self.traffic, req.kv, req.prefix_len
        self._take_row(req)
        req.is_retracted = False
        self.tokens[req.rid] = Tokens(req)
        self.prompts += len(req.full_untruncated_fill_ids)
        self.reused += begin
        self.hits[req.rid] = begin
        if begin:
            self._resume(req)
            self._compare(kv.mamba_pool_idx, req, begin)
        kv.mamba_cow_src_index, kv.mamba_needs_clear = None, False
        row = traffic.requests.req_to_token[kv.req_pool_idx]
        row[:begin] = traffic.cache.path_device_indices(req.last_node)[:begin]
        kv.kv_allocated_len = begin

    def _reserve(self, req: Req, end: int) -> bool:
        """KV up to `end`, in whole pages; False when there is none."""
        page, have = self.traffic.cache.page_size, req.kv.kv_allocated_len
        end = -(-end // page) * page
        if end > have:
            fresh = self.traffic.kv_slots(end - have)
            if fresh is None:
                return False
            row = self.traffic.requests.req_to_token[req.kv.req_pool_idx]
            row[have:end] = fresh.to(row.dtype)
            req.kv.kv_allocated_len = end
        return True

    # Verify.

    def _ready(self) -> list[Req]:
        """The running requests with KV for a step, and what SGLang prepares for them."""
        ready = [r for r in self.running if self._reserve(r, self._ahead(r))]
        if ready and get_exec().mamba.enable_mamba_extra_buffer_lazy:
            self._plan_crossings(self._batch(ready, ForwardMode.DECODE))
        return ready

    def _ahead(self, req: Req) -> int:
        return len(self.tokens[req.rid].ids) + 2 * DRAFTS

    def _plan_crossings(self, batch) -> None:
        grid = mamba_track_grid(self.traffic.cache.page_size)
        ScheduleBatch.mamba_lazy_spec_prepare(batch, grid, DRAFTS)

    def _next_tokens(self):
        if self.running and self.retractions and self.rng.random() < self.retractions:
            self.retract(self.rng.choice(self.running))
        for req in list(self.running):
            # As `ScheduleBatch.retract_decode`, one request after the other.
            while req in self.running and not self._reserve(req, self._ahead(req)):
                self.retract(self.running[-1])
        reqs = list(self.running)
        if not reqs:
            return None
        return self._verify(reqs) if self.drafter else self._decode(reqs)

    def _decode(self, reqs: list[Req]):
        """As `ScheduleBatch.prepare_for_decode`, and the step."""
        batch = self._batch(reqs, ForwardMode.DECODE)
        lengths = batch.seq_lens_cpu = batch.seq_lens + 1
        for req in reqs:
            req.decode_batch_idx += 1
            req.kv.kv_committed_len += 1
        if self.late:
            grid = mamba_track_grid(self.traffic.cache.page_size)
            if get_exec().mamba.enable_mamba_extra_buffer_lazy:
                ScheduleBatch.mamba_lazy_prealloc_at_boundary(batch, grid)
            set_mamba_track_indices_from_reqs(batch)
            batch.mamba_track_mask_cpu = (lengths % grid == 0).tolist()
            batch.mamba_track_mask_next_cpu = (lengths % grid == grid - 1).tolist()
            batch.mamba_decode_batch_idx_cpu = [req.decode_batch_idx for req in reqs]
        drawn = []
        for at, req in enumerate(reqs):
            length = len(self.tokens[req.rid].ids)
            self._write(req.kv.mamba_pool_idx, req, length)
            if self.late and batch.mamba_track_mask_cpu[at]:
                self._write(batch.mamba_track_indices[at], req, length)
            drawn.append(self._draw())
            self.tokens[req.rid].extend(drawn[-1:])
        return batch, GenerationBatchResult(next_token_ids=torch.tensor(drawn))

    def _verify(self, reqs: list[Req]):
        batch = self._batch(reqs, ForwardMode.TARGET_VERIFY)
        if get_exec().mamba.enable_mamba_extra_buffer_lazy:
            self._plan_crossings(batch)
        spec_utils.prepare_mamba_track_for_verify(batch)
        flat, lengths, states = [], [], []
        for req in reqs:
            tokens = self.tokens[req.rid]
            kept = min(self.acceptance(), DRAFTS)
            right = [self._draw() for _ in range(kept)]
            states.append(self._verified_states(tokens, right))
            flat += right + [0] * (DRAFTS - kept)
            lengths.append(kept)
            tokens.extend(right)
        self.drafted += len(reqs) * (DRAFTS - 1)
        self.accepted += sum(lengths) - len(reqs)
        self._commit(batch, torch.tensor(lengths), states)
        return batch, GenerationBatchResult(
            next_token_ids=torch.tensor(flat),
            accept_lens=torch.tensor(lengths),
            speculative_num_draft_tokens=DRAFTS,
        )

    def _verified_states(self, tokens: Tokens, right: list[int]) -> list[list[int]]:
        """Marks after each token that is verified: the last one known, then the drafts.

        Where a draft is not accepted the model's own token follows, which nothing has computed yet:
        the states from there on are of other tokens.
        """
        drafts = right[:-1] + [1] * (DRAFTS - len(right))
        sums, known = list(tokens.sums), len(tokens.ids)
        for token in drafts:
            sums.append(_after(sums[-1], token))
        return [mark(sums, known + at) for at in range(DRAFTS)]

    def _commit(self, batch, lengths, states) -> None:
        """As `commit_mamba_states_after_verify`, with the scatter in plain torch."""
        rows = len(batch.reqs)
        pool = self.traffic.requests
        cache = pool.mamba_pool.mamba_cache
        drafts = cache.intermediate_conv_window[0]
        drafts[:, :rows] = torch.tensor(states, dtype=torch.bfloat16)[None, :, :, None]
        places = torch.arange(rows * DRAFTS).view(rows, DRAFTS)
        accepted = torch.arange(DRAFTS)[None] < lengths[:, None]
        last, crossing = spec_utils._verify_commit_step_indices(
            batch=batch,
            accept_index=torch.where(accepted, places, -1),
            accept_lens=lengths,
            draft_token_num=DRAFTS,
        )
        own = pool.get_mamba_indices(batch.req_pool_indices).long()
        row = torch.arange(rows)
        cache.conv[0][:, own] = drafts[:, row, last]
        if crossing is not None:
            kept = (crossing >= 0) & (batch.mamba_track_indices >= 0)
            slots = batch.mamba_track_indices[kept].long()
            cache.conv[0][:, slots] = drafts[:, row[kept], crossing[kept]]

    # Results.

    def _take(self, batch, result: GenerationBatchResult) -> None:
        if batch.forward_mode is ForwardMode.EXTEND:
            self.processor.process_batch_result_prefill(batch, result)
            if not self.late:
                through = [req for req in batch.reqs if req.output_ids and not req.finished()]
                self.running += [req for req in through if req not in self.running]
        else:
            self.processor.process_batch_result_decode(batch, result)
        for req in batch.reqs:
            if req.finished():
                self.tokens.pop(req.rid, None)
                self.served.append(req)
        self.running = [req for req in self.running if not req.finished()]

    def retract(self, req: Req) -> None:
        """As `ScheduleBatch.retract_decode` takes one request out of the batch."""
        self.running.remove(req)
        release_req(
            req=req,
            remaing_req_count=len(self.running),
            req_to_token_pool=self.traffic.requests,
            token_to_kv_pool_allocator=self.traffic.allocator,
            tree_cache=self.traffic.cache,
            hisparse_coordinator=None,
        )
        self.queue.insert(0, req)
        self.retracted += 1

    # What both need.

    def _draw(self) -> int:
        return STOP if self.rng.random() < 0.03 else self.rng.randint(5, 9)

    def _write(self, slot, req: Req, tokens: int) -> None:
        of = torch.tensor(mark(self.tokens[req.rid].sums, tokens), dtype=torch.bfloat16)
        self.traffic.requests.mamba_pool.mamba_cache.conv[0][:, int(slot)] = of

    def _compare(self, slot, req: Req, tokens: int) -> None:
        of = torch.tensor(mark(self.tokens[req.rid].sums, tokens), dtype=torch.bfloat16)
        states = self.traffic.requests.mamba_pool.mamba_cache.conv[0][:, int(slot)]
        self.compared += 1
        self.wrong += not bool((states == of).all())

    def _batch(self, reqs: list[Req], mode: ForwardMode):
        lengths = [len(self.tokens[req.rid].ids) - 1 for req in reqs]
        return SimpleNamespace(
            **vars(self._self()),
            reqs=reqs,
            forward_mode=mode,
            seq_lens=torch.tensor(lengths),
            req_pool_indices=torch.tensor([req.kv.req_pool_idx for req in reqs]),
            batch_size=lambda: len(reqs),
        )

    def _self(self):
        return SimpleNamespace(
            model_config=self.model,
            tree_cache=self.traffic.cache,
            req_to_token_pool=self.traffic.requests,
            spec_algorithm=SpeculativeAlgorithm.EAGLE
            if self.drafter
            else SpeculativeAlgorithm.NONE,
            decoding_reqs=None,
            has_grammar=False,
            return_logprob=False,
            return_hidden_states=False,
            return_hidden_states_mode=CaptureHiddenMode.NULL,
            spec_info=None,
            prefill_stats=None,
            mamba_track_mask_cpu=None,
            mamba_track_indices=None,
            mamba_lazy_spec_track_positions_cpu=None,
        )
