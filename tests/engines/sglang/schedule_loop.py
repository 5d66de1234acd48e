"""SGLang's scheduling over the real cache layer: its own policy, adder and requests, no model.

A step does what `Scheduler.get_next_batch_to_run` does, and counts tokens where a model would run.
Each state says of which prefix it is, and every reuse is compared.
"""

from __future__ import annotations

import zlib

import torch
from cache_layer import Traffic
from scheduled import adder, request, take_back
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder, SchedulePolicy
from sglang.srt.mem_cache.allocation import alloc_req_slots
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache


def serve(traffic: Traffic, tokens: list[int], chunk: int) -> tuple[int, list[int]]:
    """One request by itself; return its hit and where its chunks ended."""
    run = Loop(traffic, chunk)
    req = run.add(tokens)
    run.run()
    return run.hits[req.rid], run.chunk_ends[req.rid]


class Loop:
    """One scheduler. With `overlap` a batch is made before the last one's result is there."""

    def __init__(
        self,
        traffic: Traffic,
        chunk: int | None,
        overlap: bool = False,
        by_priority: bool = False,
    ):
        self.traffic, self.chunk = traffic, chunk
        self.policy = SchedulePolicy("fcfs", traffic.cache, False, by_priority, False)
        self.queue: list[Req] = []
        self.chunked: Req | None = None
        self.in_flight: list[list[Req]] = []
        self.late = int(overlap)
        self.aborted_chunk: Req | None = None
        self.computed = 0
        self.steps = 0
        self.hits: dict[str, int] = {}
        self.ended: dict[str, tuple[int, int]] = {}  # by request: steps and tokens until then
        self.chunk_ends: dict[str, list[int]] = {}
        self.idle = 0  # steps in which requests waited and nothing ran

    def add(self, tokens: list[int], **more: str) -> Req:
        made = request(tokens, **more)
        self.queue.append(made)
        return made

    def forget(self) -> None:
        """Start the records over."""
        for records in (self.hits, self.ended, self.chunk_ends):
            records.clear()

    def abort(self, req: Req) -> None:
        """As `Scheduler.abort_request`."""
        if req in self.queue:
            self.queue.remove(req)
            req.finished_reason = FINISH_ABORT("gone")
            if req.kv.holds_mamba:
                release_kv_cache(req, self.traffic.cache, checkpoint=False)
        elif req is self.chunked:
            self.aborted_chunk = req
        elif not req.finished():
            req.to_finish = FINISH_ABORT("gone")

    def run(self, most: int = 10_000) -> None:
        while self.queue or self.chunked or self.in_flight:
            self.step()
            assert self.steps < most, "the loop does not end"

    def step(self) -> list[Req]:
        """One turn; returns what was admitted."""
        self.steps += 1
        batch = self._next_batch()
        for req in batch:
            self._compute(req)
        if batch:
            self.in_flight.append(batch)
        elif self.queue and not self.in_flight:
            self.idle += 1
        while len(self.in_flight) > (self.late if batch else 0):
            self._process(self.in_flight.pop(0))
        return batch

    def _next_batch(self) -> list[Req]:
        cache = self.traffic.cache
        self._drop_aborted_chunk()
        if self.chunked is not None and self.chunked.extend_end > self.chunked.prefix_len:
            checkpoint_kv_cache(self.chunked, cache)
        if not self.queue and self.chunked is None:
            return []
        self.policy.calc_priority(self.queue, None)
        admission = self._adder()
        if self.chunked is not None:
            self.chunked.init_next_round_input()
            self.chunked = admission.add_chunked_req(self.chunked)
        states = self.traffic.requests.mamba_allocator
        states.alloc_group_begin(len(self.queue))
        for req in self.queue:
            if admission.budget_state() == AddReqResult.OTHER:
                break
            if len(admission.can_run_list) >= self.traffic.requests.available_size():
                break
            req.init_next_round_input(cache)
            found = admission.add_one_req(
                req, has_chunked_req=self.chunked is not None, truncation_align_size=None
            )
            if found != AddReqResult.CONTINUE:
                if req not in admission.can_run_list:
                    take_back(self.traffic, req)
                break
        states.alloc_group_end()
        self.queue = [req for req in self.queue if req not in admission.can_run_list]
        if admission.new_chunked_req is not None:
            assert self.chunked is None
            self.chunked = admission.new_chunked_req
        return admission.can_run_list

    def _adder(self) -> PrefillAdder:
        return adder(self.traffic, self.chunk)

    def _drop_aborted_chunk(self) -> None:
        req, self.aborted_chunk = self.aborted_chunk, None
        if req is None:
            return
        if req is not self.chunked:
            if not req.finished():
                req.to_finish = FINISH_ABORT("gone")
            return
        self.chunked = None
        req.finished_reason = FINISH_ABORT("gone")
        release_kv_cache(req, self.traffic.cache, checkpoint=False)

    def _compute(self, req: Req) -> None:
        traffic, kv = self.traffic, req.kv
        begin, end = req.prefix_len, req.extend_end
        if not kv.holds_kv:
            self._take_row(req)
            self.hits[req.rid] = begin
            self.chunk_ends[req.rid] = []
            if begin:
                self._resume(req)
            kv.mamba_cow_src_index, kv.mamba_needs_clear = None, False
            row = traffic.requests.req_to_token[kv.req_pool_idx]
            row[:begin] = traffic.cache.path_device_indices(req.last_node)[:begin]
        assert begin == 0 or self._is_of(int(kv.mamba_pool_idx), req, begin)
        fresh = traffic.kv_slots(end - begin)
        row = traffic.requests.req_to_token[kv.req_pool_idx]
        row[begin:end] = fresh.to(row.dtype)
        kv.kv_allocated_len = kv.kv_committed_len = end
        self.computed += end - begin
        self.chunk_ends[req.rid].append(end)
        states = traffic.requests.mamba_pool.mamba_cache
        states.conv[0][:, int(kv.mamba_pool_idx)] = _mark(req, end)

    def _take_row(self, req: Req) -> None:
        alloc_req_slots(self.traffic.requests, [req], self.traffic.cache)

    def _resume(self, req: Req) -> None:
        pool, source, target = self.traffic.requests, *_slots_of(req)
        assert int(source) in self.traffic.state_slots()
        if pool.mamba_ckpt_pool is None:
            pool.mamba_pool.copy_from(source.view(-1), target.view(-1))
        else:
            pool.mamba_ckpt_pool.load_to_active(pool.mamba_pool, source.view(-1), target.view(-1))

    def _is_of(self, slot: int, req: Req, tokens: int) -> bool:
        states = self.traffic.requests.mamba_pool.mamba_cache
        return bool((states.conv[0][:, slot] == _mark(req, tokens)).all())

    def _process(self, batch: list[Req]) -> None:
        for req in batch:
            through = req.extend_end >= len(req.full_untruncated_fill_ids)
            if req.finished() or req is self.chunked or not through:
                continue
            req.output_ids.append(1)
            req.finished_reason = req.to_finish or FINISH_ABORT("its length")
            req.finished_len = 1
            self.ended[req.rid] = (self.steps, self.computed)
            release_kv_cache(req, self.traffic.cache, checkpoint=True)


def _slots_of(req: Req) -> tuple[torch.Tensor, torch.Tensor]:
    return req.kv.mamba_cow_src_index, req.kv.mamba_pool_idx


def _mark(req: Req, tokens: int) -> torch.Tensor:
    """Three numbers that bfloat16 holds exactly."""
    of = zlib.crc32(
        req.origin_input_ids[:tokens].tobytes(), zlib.crc32(repr(req.extra_key).encode())
    )
    return torch.tensor([of % 251, of // 251 % 241, of // 60_491 % 239], dtype=torch.bfloat16)
