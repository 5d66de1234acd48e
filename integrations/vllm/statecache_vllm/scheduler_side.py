"""The scheduler's half of the connector: what vLLM's scheduler says, and to which part it goes."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from statecache._blocks import BlockHashIndex, BlockQueue
from statecache.engine.patching import Patch, PatchSet, detect_overrides
from statecache.engine.settings import Settings
from statecache.errors import exit_engine
from statecache_vllm import patches, proof, seams
from statecache_vllm.awaited_reports import AwaitedReports
from statecache_vllm.block_queues import new_queue
from statecache_vllm.cache_layout import CacheLayout
from statecache_vllm.checkpoint_memory import is_exact, pool_slots
from statecache_vllm.checkpoints import CheckpointCopy, CheckpointManager
from statecache_vllm.hand_over import ActiveParts
from statecache_vllm.lookup import Lookup
from statecache_vllm.pool_changes import PoolChanges
from statecache_vllm.prefill_chunks import ChunkEnds, settle_interval
from statecache_vllm.queued_heads import QueuedHeads
from statecache_vllm.reporting import SchedulerReport
from statecache_vllm.seam_table import REPLACED
from statecache_vllm.stores import Stores
from statecache_vllm.views import (
    KVCacheBlocks,
    KVCacheConfig,
    KVCacheManager,
    Request,
    SchedulerOutput,
    VllmConfig,
)

__all__ = ["SchedulerSide"]

_log = logging.getLogger("statecache.vllm")

_TYPICAL_PROMPT = 512  # tokens; a larger block leaves many prompts nothing to share


class SchedulerSide:
    """The plugin in one scheduler: `parts` in force, `lookup` and `stores`, `report` of numbers."""

    lookup: Lookup
    stores: Stores
    layout: CacheLayout

    def __init__(
        self, settings: Settings, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
    ) -> None:
        self._settings = settings
        self.parts = ActiveParts()
        self.faults = self.parts.faults
        self.proofs = proof.ProofKeeper(self.faults)
        self.report = SchedulerReport(settings, self.parts, kv_cache_config, self.proofs.events)
        self._groups = seams.groups_of(kv_cache_config)
        self._slots = 0
        if settings.checkpoints is not None:
            states, attention, other = self._groups
            if other or not states or not attention:
                exit_engine(
                    "a checkpoint pool needs a model of full attention and recurrent layers only"
                )
            self._slots = pool_slots(settings, vllm_config, kv_cache_config)
        if self._slots or (vllm_config.speculative_config is not None and not settings.dry_run):
            proof.install()
        self._interval = settle_interval(
            settings,
            vllm_config.cache_config,
            kv_cache_config,
            vllm_config.model_config.max_model_len,
        )
        self.reports = AwaitedReports()
        self.chunk_ends: ChunkEnds | None = None

    @property
    def queue(self) -> BlockQueue | None:
        """The block queue that is in force, None for vLLM's own."""
        return self.parts.queue

    @property
    def checkpoints(self) -> CheckpointManager | None:
        """The checkpoints that are in force, None where nothing is restored."""
        return self.parts.checkpoints

    def bind(self, manager: KVCacheManager) -> None:
        """Take the place of the free queue of a new `KVCacheManager`, and see its lookups."""
        pool = self.parts.pool = manager.block_pool
        sizes = {each.block_size for each in manager.coordinator.single_type_managers}
        block = max(sizes)
        states, attention, _ = self._groups
        self.layout = CacheLayout(
            tuple(states),
            tuple(attention),
            block,
            block // pool.hash_block_size,
            self._interval,
            drops_block=manager.use_eagle,
        )
        self.stores = Stores(self.parts, self.layout)
        self.lookup = Lookup(self._settings, self.parts, self.layout, manager, self.report)
        if self._slots and len(sizes) > 1:
            exit_engine(f"a checkpoint pool needs one block size, not {sizes}")
        rows = [patches.GET_COMPUTED_BLOCKS.on(manager).wrapped_by(self.lookup.get_computed_blocks)]
        if self._settings.dry_run:
            rows.append(patches.REMOVE_SKIPPED_BLOCKS.on(manager).replaced_by(_remove_nothing))
        else:
            named = self.lookup.cache_partial_block
            rows.append(patches.CACHE_PARTIAL_BLOCK.on(pool).wrapped_by(named))
        if self._settings.wait_for_head == "on":
            grid, unit = math.lcm(*sizes), pool.hash_block_size
            cost = self._settings.cost_model()
            counts = self.report.counts
            self.lookup.heads = QueuedHeads(
                cost, grid, unit, self._interval, counts, drops_block=manager.use_eagle
            )
        if self._settings.block_policy != "stock" or self._slots:
            self._take_blocks(manager, rows)
        PatchSet(rows).install()
        if states and not self._settings.dry_run:
            of_states = manager.coordinator.single_type_managers[states[0]].block_size
            self.chunk_ends = ChunkEnds(of_states, self._interval, self.lookup)
        self._say_what_is_in_force()

    def _take_blocks(self, manager: KVCacheManager, rows: list[Patch]) -> None:
        """Fill our queue from vLLM's and add to `rows` what puts it in the place of that one."""
        parts, pool = self.parts, self.parts.pool
        parts.block_index = BlockHashIndex(pool.blocks)
        queue, protected = new_queue(self._settings, parts.block_index, self.layout)
        changes = PoolChanges(parts, self.layout, queue, self.forget)
        if self._slots:
            parts.checkpoints = CheckpointManager(
                self._settings,
                self._slots,
                self.layout.block_tokens,
                changes.note_checkpoint,
                exact=is_exact(self._settings),
            )
            queue.lost = changes.key_left
        seams.require_empty(pool)
        queue.append_n(pool.free_block_queue.popleft_n(pool.free_block_queue.num_free_blocks))
        rows += [
            patches.BLOCK_MAP.on(pool).replaced_by(changes.new_map()),
            patches.FREE_QUEUE.on(pool).replaced_by(changes.guarded_queue),
            patches.TOUCH.on(pool).replaced_by(changes.touch),
            patches.RESET_PREFIX_CACHE.on(pool).wrapped_by(changes.reset_prefix_cache),
            patches.EVICT_BLOCKS.on(pool).wrapped_by(changes.evict_blocks),
        ]
        self.lookup.protected = protected
        if protected is not None:
            rows.append(patches.ALLOCATE_SLOTS.on(manager).wrapped_by(protected.allocate_slots))
        parts.take_blocks(queue, detect_overrides(s.target for s in REPLACED if s.replaced))

    def _say_what_is_in_force(self) -> None:
        block = self.layout.block_tokens
        _log.info(
            "statecache: block policy %s; %d blocks of %d tokens; %d checkpoints, %s tokens apart",
            self._settings.block_policy,
            self.parts.pool.get_num_free_blocks(),
            block,
            self._slots,
            self._interval or "(none)",
        )
        level = logging.WARNING if block > _TYPICAL_PROMPT else logging.INFO
        smallest = "statecache: the smallest prefix that can be reused is %d tokens"
        _log.log(level, smallest, block)

    # What the connector hears.

    def added(self, request: Request) -> None:
        """A request was added."""
        self.stores.requests[request.request_id] = request

    def finished(self, request: Request) -> None:
        """A request ended, for whatever reason."""
        requests = self.stores.requests
        requests.pop(request.request_id, None)
        self.report.finished(request.request_id, last=not requests)
        self.lookup.finished(request)
        self.reports.finished(request)

    def admitted(self, request: Request, blocks: KVCacheBlocks) -> None:
        """A request got its blocks: what was found for it is certain now."""
        self.lookup.admitted(request, blocks)

    def must_wait(self, request: Request) -> bool:
        """Whether a request that was just looked up is to stay in the queue for this step."""
        if self._settings.dry_run:
            return False
        expected = self.lookup.expected
        if expected is not None and self.reports.must_wait(request, expected):
            return True
        return self.lookup.must_wait(request)

    def plan(self, step: SchedulerOutput) -> tuple[list[CheckpointCopy], list[CheckpointCopy]]:
        """Return the restores and stores of this step."""
        self.parts.before_step()
        self.lookup.stepped(step.num_scheduled_tokens)
        return self.lookup.take_restores(), self.stores.plan(step)

    def stored(self, states: Sequence[int], refused: Sequence[int], *, failed: bool) -> None:
        """The workers report; `failed` if one of them could not store."""
        self.stores.complete(states, refused, failed=failed)

    def note_proof(self, found: proof.StepProof) -> None:
        """The workers report what they looked at more closely."""
        self.proofs.note(found)

    def forget(self) -> None:
        """Drop every checkpoint: the weights may have changed."""
        self.lookup.forget()
        self.stores.forget()


def _remove_nothing(*_args: object, **_kwargs: object) -> None:
    """In the place of `KVCacheManager.remove_skipped_blocks` in a dry run."""
