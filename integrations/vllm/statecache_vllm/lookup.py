"""What a lookup finds: vLLM's own hit, made longer by a state in a checkpoint.

vLLM repeats a lookup until the request is admitted; only then is what was found certain.
"""

from __future__ import annotations

from collections.abc import Callable

from statecache.engine.faults import guarded
from statecache.engine.settings import Settings
from statecache.index.policies import find_policy
from statecache_vllm import seams
from statecache_vllm.block_queues import ProtectedRequests
from statecache_vllm.cache_layout import CacheLayout
from statecache_vllm.checkpoints import CheckpointCopy, CheckpointManager
from statecache_vllm.hand_over import ActiveParts
from statecache_vllm.reporting import SchedulerReport
from statecache_vllm.views import (
    FoundBlocks,
    KVCacheBlock,
    KVCacheBlocks,
    KVCacheManager,
    Request,
)

__all__ = ["Lookup"]


class Lookup:
    """Lookups and admissions of one scheduler, and the restores planned in them.

    `planned` holds, for a request that was looked up, the state it is to resume from; `restores`
    those of the requests admitted since the last step. `protected` is there where the block queue
    listens to requests.
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
        self.planned: dict[str, CheckpointCopy] = {}
        self.restores: list[CheckpointCopy] = []
        self._parts = parts
        self._layout = layout
        self._manager = manager
        self._report = report
        self._follows_prompts = find_policy(settings.policy).needs_prompts
        self._resident: dict[str, int] = {}  # tokens of a request whose KV was there
        self._hit: dict[str, int] = {}  # states that served a lookup from their blocks

    @property
    def known(self) -> set[str]:
        """The names of all requests something is held of."""
        protected = set[str]() if self.protected is None else self.protected.known
        return protected.union(self.planned, self._resident, self._hit)

    def get_computed_blocks(
        self, original: Callable[[Request], FoundBlocks], request: Request
    ) -> FoundBlocks:
        """Around `KVCacheManager.get_computed_blocks`: the only place where a lookup comes in."""
        found = self._find(original, request) if self._parts.owns_blocks else original(request)
        self._report.looked_up(request, found)
        return found

    def _find(self, original: Callable[[Request], FoundBlocks], request: Request) -> FoundBlocks:
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
        self, original: Callable[[Request], FoundBlocks], request: Request
    ) -> FoundBlocks:
        self._parts.hand_over_map()
        return original(request)

    @guarded(_find_in_vllms_map)
    def _find_in_blocks(
        self, original: Callable[[Request], FoundBlocks], request: Request
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
        self._resident[request.request_id] = max(hit, resident)
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
        _, hit, resident = found
        path = layout.path(request, resident)
        best = checkpoints.lookup(path, hit // layout.block_tokens)
        if best is None:
            return found
        state, slot = best
        depth = checkpoints.tree.depth_of(state)
        kv = self._kv_of(request, depth)
        if kv is None:
            return found
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

    def _kv_of(self, request: Request, depth: int) -> dict[int, list[KVCacheBlock]] | None:
        """Return the first `depth` blocks of KV by group, None where vLLM does not find them."""
        layout = self._layout
        found, hits = self._manager.coordinator.find_longest_cache_hit_per_group(
            request.block_hashes, request.num_tokens - 1
        )
        if any(hits[group] < depth * layout.block_tokens for group in layout.attention_groups):
            return None
        return {group: list(found[group][:depth]) for group in layout.attention_groups}

    def admitted(self, request: Request, blocks: KVCacheBlocks) -> None:
        """A request got its blocks: the restore planned for it will run in this step.

        Raises `RuntimeError` where vLLM took other blocks than those the state is restored to: the
        request must not go on from a block without its state.
        """
        planned = self.planned.pop(request.request_id, None)
        self._report.admitted(request)
        if planned is not None:
            self.restores.append(planned)
            for at, group in zip(planned[2], self._layout.state_groups, strict=True):
                if at not in {block.block_id for block in blocks.blocks[group]}:
                    raise RuntimeError(
                        "statecache: vLLM did not take the block of a restored state"
                    )
        restored = None if planned is None else planned[0]
        self._use(request, self._hit.pop(request.request_id, None), restored)

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
            offered = self._layout.offered_blocks(len(path))
            checkpoints.tree.requested(path, tokens, offered, resident)
        if hit is not None and hit in checkpoints.tree:
            checkpoints.tree.use(hit)
        if restored is not None:
            checkpoints.restored(restored)

    def take_restores(self) -> list[CheckpointCopy]:
        """Return the restores of the next step, once."""
        restores, self.restores = self.restores, []
        return restores

    def finished(self, name: str) -> None:
        """Forget a request."""
        self.planned.pop(name, None)
        self._resident.pop(name, None)
        self._hit.pop(name, None)
        if self.protected is not None:
            self.protected.finished(name)

    def forget(self) -> None:
        """Forget what was found: no checkpoint is there any more."""
        self.planned.clear()
        self._resident.clear()
        self._hit.clear()
