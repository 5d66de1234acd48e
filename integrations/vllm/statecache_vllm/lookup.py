"""What a lookup finds: vLLM's own hit, made longer by a state in a checkpoint.

vLLM repeats a lookup until the request is admitted; only then is what was found certain.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import cast

from statecache.engine.faults import guarded
from statecache.engine.settings import Settings
from statecache.index.policies import find_policy
from statecache_vllm import seams
from statecache_vllm.block_queues import ProtectedRequests
from statecache_vllm.cache_layout import CacheLayout
from statecache_vllm.checkpoints import CheckpointCopy, CheckpointManager
from statecache_vllm.hand_over import ActiveParts
from statecache_vllm.queued_heads import QueuedHeads
from statecache_vllm.reporting import SchedulerReport
from statecache_vllm.views import (
    FoundBlocks,
    KVCacheBlock,
    KVCacheBlocks,
    KVCacheManager,
    Request,
    StateManager,
)

__all__ = ["Lookup"]


class Lookup:
    """Lookups and admissions of one scheduler, and the restores planned in them.

    `planned` holds, for a request that was looked up, the state it is to resume from; `restores`
    those of the requests admitted since the last step. `protected` is there where the block queue
    listens to requests, `heads` where requests may wait for each other. `expected` is a state
    that would make the last hit longer: stored, but not yet known to be good.
    """

    def __init__(
        self,
        settings: Settings,
        parts: ActiveParts,
        layout: CacheLayout,
        manager: KVCacheManager,
        report: SchedulerReport,
    ) -> None:
        self.faults = parts.faults
        self.protected: ProtectedRequests | None = None
        self.heads: QueuedHeads | None = None
        self.planned: dict[str, CheckpointCopy] = {}
        self.restores: list[CheckpointCopy] = []
        self._parts = parts
        self._layout = layout
        self._manager = manager
        self._report = report
        self._states = [
            cast("StateManager", manager.coordinator.single_type_managers[group])
            for group in layout.state_groups
        ]
        self.expected: int | None = None
        self._found: FoundBlocks | None = None
        self._kv: tuple[dict[int, list[KVCacheBlock]], int] | None = None  # of the same request
        self._most = 0  # tokens that the request that is being looked up may hit
        self._follows_prompts = find_policy(settings.policy).needs_prompts
        self._resident: dict[str, int] = {}  # tokens of a request whose KV was there
        self._hit: dict[str, int] = {}  # states that served a lookup from their blocks
        if layout.drops_block:
            report.reach_and_loss = self._reach_and_loss

    @property
    def known(self) -> set[str]:
        """The names of all requests something is held of."""
        protected = set[str]() if self.protected is None else self.protected.known
        heads = set[str]() if self.heads is None else self.heads.known
        return protected.union(self.planned, self._resident, self._hit, heads)

    def get_computed_blocks(
        self,
        original: Callable[..., FoundBlocks],
        request: Request,
        max_cache_hit_length: int | None = None,
    ) -> FoundBlocks:
        """Around `KVCacheManager.get_computed_blocks`: the only place where a lookup comes in.

        A hit has less than all tokens of the request, and no more than a limit (from vLLM 0.33 on).
        """
        self._found = self._kv = self.expected = None
        if self._still_waits(request):
            return self._manager.empty_kv_cache_blocks, 0, 0
        self._most = request.num_tokens - 1
        if max_cache_hit_length is not None:
            self._most = min(self._most, max_cache_hit_length)
            original = functools.partial(original, max_cache_hit_length=max_cache_hit_length)
        found = self._find(original, request) if self._parts.owns_blocks else original(request)
        self._report.looked_up(request, found)
        self._found = found
        return found

    def _reach(self, request: Request, found: FoundBlocks) -> int:
        """Return after how many tokens a request could resume, were the state there.

        VLLM says how far one group of attention reaches. That of a drafter ends a block earlier.
        """
        _, hit, resident = found
        if resident > hit and len(self._layout.attention_groups) > 1:
            resident = self._kv_of(request)[1] * self._layout.block_tokens
        return max(hit, resident)

    def _reach_and_loss(self, request: Request, found: FoundBlocks) -> tuple[int, int]:
        """Return that, and the tokens of the block behind a hit that goes as far, if it is cached.

        A hit that ends before lacks a state: what is behind `reach` is not lost to the drafter.
        """
        layout, pool = self._layout, self._manager.block_pool
        reach = self._reach(request, found)
        tokens = (reach // layout.block_tokens + 1) * layout.block_tokens
        missed = found[1] < reach  # for want of a state, drafter or not
        if missed or tokens >= request.num_tokens:
            return reach, 0
        if not self._manager.prefix_cache_lookup_enabled(request):
            return reach, 0
        cached = pool.cached_block_hash_to_block.get_one_block
        keys = [self._key_at(request, tokens, group) for group in layout.attention_groups]
        return reach, 0 if any(cached(key) is None for key in keys) else layout.block_tokens

    def _wait_for_nothing(self, *_: object) -> bool:
        self.heads = None
        return False

    @guarded(_wait_for_nothing)
    def _still_waits(self, request: Request) -> bool:
        return self.heads is not None and self.heads.still_waits(request)

    @guarded(_wait_for_nothing)
    def must_wait(self, request: Request) -> bool:
        """Whether a request that was just looked up is to stay in the queue for this step.

        So it is where its state is written in this very step: vLLM would have all others wait, too.
        """
        if self._found is None:
            return True
        if not self._manager.prefix_cache_lookup_enabled(request):
            return False
        blocks, hit, _ = self._found
        for group, states in zip(self._layout.state_groups, self._states, strict=True):
            found = blocks.blocks[group]
            if found and found[-1].block_hash in states.cached_blocks_this_step:
                return True
        return self.heads is not None and self.heads.must_wait(request, hit)

    def _find(self, original: Callable[..., FoundBlocks], request: Request) -> FoundBlocks:
        found = self._find_in_blocks(original, request)
        self.planned.pop(request.request_id, None)
        if not self._manager.prefix_cache_lookup_enabled(request):
            return found
        if self._parts.checkpoints is not None:
            found = self._find_in_checkpoints(self._parts.checkpoints, request, found)
        if self.protected is not None and self._parts.queue is not None:
            self._learn(self.protected, request, found)
        return found

    def _find_in_vllms_map(
        self, original: Callable[..., FoundBlocks], request: Request
    ) -> FoundBlocks:
        self._parts.hand_over_map()
        return original(request)

    @guarded(_find_in_vllms_map)
    def _find_in_blocks(
        self, original: Callable[..., FoundBlocks], request: Request
    ) -> FoundBlocks:
        return original(request)

    def _hand_over_queue(self, *_: object) -> None:
        self._parts.hand_over_queue()

    @guarded(_hand_over_queue)
    def _learn(self, protected: ProtectedRequests, request: Request, found: FoundBlocks) -> None:
        protected.looked_up(request, found)

    def _find_no_checkpoint(
        self, _: CheckpointManager, request: Request, found: FoundBlocks
    ) -> FoundBlocks:
        self.planned.pop(request.request_id, None)
        self._parts.end_checkpoints()
        return found

    @guarded(_find_no_checkpoint)
    def _find_in_checkpoints(
        self, checkpoints: CheckpointManager, request: Request, found: FoundBlocks
    ) -> FoundBlocks:
        _, hit, resident = found
        self._resident[request.request_id] = self._reach(request, found)
        if resident > hit:
            found = self._with_restore(checkpoints, request, found)
        if request.request_id not in self.planned:
            self._note_hit(checkpoints, request, found[1])
        return found

    def _note_hit(self, checkpoints: CheckpointManager, request: Request, tokens: int) -> None:
        """A checkpoint is used, too, when its state is served from blocks."""
        self._hit.pop(request.request_id, None)
        if tokens and tokens % self._layout.block_tokens == 0:
            last = tokens // self._manager.block_pool.hash_block_size - 1
            state = checkpoints.tree.find(request.block_hashes[last])
            if state is not None:
                self._hit[request.request_id] = state

    def _with_restore(
        self, checkpoints: CheckpointManager, request: Request, found: FoundBlocks
    ) -> FoundBlocks:
        """Return the hit that a checkpoint makes possible, or `found`.

        The blocks are free until the request is admitted, as those of any hit: nothing else is
        handed out in between, and a request that is not admitted is looked up again.
        """
        layout = self._layout
        resident, above = found[2], found[1] // layout.block_tokens
        path = layout.path(request, min(resident, self._most))
        if next(checkpoints.states_on(path, above), None) is None:
            return found
        kv, reach = self._kv_of(request)
        self.expected = checkpoints.expected(path[:reach], above)
        best = checkpoints.lookup(path[:reach], above)
        if best is None:
            return found
        state, slot = best
        depth = checkpoints.tree.depth_of(state)
        kv = {group: blocks[:depth] for group, blocks in kv.items()}
        pool = self._manager.block_pool
        kept = [block for blocks in kv.values() for block in blocks]
        fresh = seams.fresh_blocks(pool, len(layout.state_groups), kept)
        if fresh is None or self._parts.checkpoints is None or state not in checkpoints.tree:
            return found
        skipped = [pool.null_block] * (depth - 1)
        by_group = kv | {
            group: [*skipped, block]
            for group, block in zip(layout.state_groups, fresh, strict=True)
        }
        blocks = tuple(block.block_id for block in fresh)
        prefix = layout.prefix(path[:depth])
        self.planned[request.request_id] = CheckpointCopy(state, slot, blocks, prefix)
        tokens = depth * layout.block_tokens
        groups = [by_group[group] for group in sorted(by_group)]
        return seams.kv_blocks(groups), tokens, resident if resident > tokens else 0

    def _kv_of(self, request: Request) -> tuple[dict[int, list[KVCacheBlock]], int]:
        """Return the blocks of KV by group, and how many of them all groups have.

        The KV of a drafter, in a group of its own, may be there for fewer blocks. VLLM is asked
        once in a lookup.
        """
        if self._kv is not None:
            return self._kv
        layout = self._layout
        found, hits = self._manager.coordinator.find_longest_cache_hit_per_group(
            request.block_hashes, self._most
        )
        reach = min(hits[group] for group in layout.attention_groups) // layout.block_tokens
        self._kv = {group: list(found[group]) for group in layout.attention_groups}, reach
        return self._kv

    def admitted(self, request: Request, blocks: KVCacheBlocks) -> None:
        """A request got its blocks: the restore planned for it will run in this step.

        Raises `RuntimeError` where vLLM took other blocks than those the state is restored to: the
        request must not go on from a block without its state.
        """
        planned = self.planned.pop(request.request_id, None)
        self._note_wait(request, self._report.hit_of(request))
        self._report.admitted(request)
        if planned is not None:
            self._promise(planned, request, blocks)
        restored = None if planned is None else planned.state
        self._use(request, self._hit.pop(request.request_id, None), restored)

    def _promise(self, copy: CheckpointCopy, request: Request, blocks: KVCacheBlocks) -> None:
        """Have a state restored, and its blocks found by others from now on.

        They are filled before anything reads them in this step.
        """
        depth = copy.prefix.depth // self._layout.block_tokens
        self.restores.append(copy)
        for at, group in zip(copy.blocks, self._layout.state_groups, strict=True):
            if [block.block_id for block in blocks.blocks[group][depth - 1 : depth]] != [at]:
                raise RuntimeError("statecache: vLLM did not take the block of a restored state")
        for group in self._layout.state_groups:
            self._manager.block_pool.cache_full_blocks(
                request=request,
                blocks=blocks.blocks[group],
                num_cached_blocks=depth - 1,
                num_full_blocks=depth,
                block_size=self._layout.block_tokens,
                kv_cache_group_id=group,
            )

    def cache_partial_block(
        self,
        original: Callable[..., bytes | None],
        request: Request,
        block: KVCacheBlock,
        num_tokens: int,
        kv_cache_group_id: int,
        block_size: int,
        replace_existing_hashes: bool = False,
    ) -> bytes | None:
        """Around `BlockPool.cache_partial_block`: a name that is there already is no new one."""
        if not replace_existing_hashes and num_tokens % block_size == 0:
            key = self._key_at(request, num_tokens, kv_cache_group_id)
            if self._is_there(key, request, block):
                return None
        return original(
            request=request,
            block=block,
            num_tokens=num_tokens,
            kv_cache_group_id=kv_cache_group_id,
            block_size=block_size,
            replace_existing_hashes=replace_existing_hashes,
        )

    def _key_at(self, request: Request, tokens: int, group: int) -> bytes:
        last = tokens // self._manager.block_pool.hash_block_size - 1
        return seams.key_of(request.block_hashes[last], group)

    def _is_there(self, key: bytes, request: Request, block: KVCacheBlock) -> bool:
        """Whether a block holds what `key` names, or will before anything reads it in this step."""
        planned = self.planned.get(request.request_id)
        if planned is not None and block.block_id in planned.blocks:
            return True
        return self._manager.block_pool.cached_block_hash_to_block.contain(key, block.block_id)

    def _end_checkpoints(self, *_: object) -> None:
        self._parts.end_checkpoints()

    @guarded(_end_checkpoints)
    def _use(self, request: Request, hit: int | None, restored: int | None) -> None:
        """The checkpoints learn of an admitted prompt and of the state that served it."""
        checkpoints = self._parts.checkpoints
        if checkpoints is None:
            return
        if self._follows_prompts:
            tokens = request.num_tokens
            path = self._layout.path(request, tokens)
            resident = self._resident.pop(request.request_id, 0)
            offered = self._layout.offered_blocks(tokens)
            checkpoints.tree.requested(path, tokens, offered, resident)
        if hit is not None and hit in checkpoints.tree:
            checkpoints.tree.use(hit)
        if restored is not None:
            checkpoints.restored(restored)

    def take_restores(self) -> list[CheckpointCopy]:
        """Return the restores of the next step, once."""
        restores, self.restores = self.restores, []
        return restores

    def finished(self, request: Request) -> None:
        """Forget a request."""
        name = request.request_id
        self._end_wait(request)
        self.planned.pop(name, None)
        self._resident.pop(name, None)
        self._hit.pop(name, None)
        if self.protected is not None:
            self.protected.finished(name)

    @guarded(_wait_for_nothing)
    def _note_wait(self, request: Request, hit: int) -> bool:
        if self.heads is not None:
            self.heads.admitted(request, hit)
        return False

    @guarded(_wait_for_nothing)
    def _end_wait(self, request: Request) -> bool:
        if self.heads is not None:
            self.heads.finished(request)
        return False

    def stepped(self, scheduled: Mapping[str, int]) -> None:
        """A step of so many tokens a request is planned."""
        self._found = None
        self._note_step(scheduled)

    @guarded(_wait_for_nothing)
    def _note_step(self, scheduled: Mapping[str, int]) -> bool:
        if self.heads is not None:
            self.heads.stepped(scheduled)
        return False

    def forget(self) -> None:
        """Forget what was found: no checkpoint is there any more."""
        self.planned.clear()
        self._resident.clear()
        self._hit.clear()
