"""Which of the states that a step leaves behind are stored, and what became of each store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from statecache.engine.faults import guarded
from statecache.engine.metric_table import MetricKey
from statecache_vllm import seams
from statecache_vllm.cache_layout import CacheLayout
from statecache_vllm.checkpoints import CheckpointCopy, CheckpointManager
from statecache_vllm.hand_over import ActiveParts
from statecache_vllm.views import BoundaryStates, Request, SchedulerOutput

__all__ = ["Stores"]


class Stores:
    """Plans the stores of each step of one scheduler. `requests` are those it serves, by name."""

    def __init__(self, parts: ActiveParts, layout: CacheLayout) -> None:
        self.faults = parts.faults
        self.requests: dict[str, Request] = {}
        self._parts = parts
        self._layout = layout

    def plan(self, step: SchedulerOutput) -> list[CheckpointCopy]:
        """Return what the workers are to store after the forward of this step."""
        if self._parts.checkpoints is None:
            return []
        states = step.kv_connector_block_state
        return self._plan(self._parts.checkpoints, states, step.num_scheduled_tokens)

    def _plan_nothing(self, *_: object) -> list[CheckpointCopy]:
        self._parts.end_checkpoints()
        return []

    @guarded(_plan_nothing)
    def _plan(
        self,
        checkpoints: CheckpointManager,
        states: BoundaryStates | None,
        scheduled: Mapping[str, int],
    ) -> list[CheckpointCopy]:
        checkpoints.begin_step()
        copies: list[CheckpointCopy] = []
        if states is None:
            return copies
        for name, offers in states.boundary_state_offloads.items():
            request = self.requests.get(name)
            if request is not None:
                written = self._written(request, offers, scheduled.get(name, 0))
                copies += self._copies_of(checkpoints, request, written)
        return copies

    def _written(
        self, request: Request, offers: Sequence[tuple[int, int, int]], tokens: int
    ) -> Sequence[tuple[int, int, int]]:
        """Return those of `offers` that the step, of so many tokens, writes.

        A step that begins inside a block and runs past its end leaves the state after its begin
        there. Chunks end at the end of such a block; where they do not, it loses its name.
        """
        start, block = request.num_computed_tokens, self._layout.block_tokens
        end = start // block * block + block
        if start % block == 0 or start + tokens <= end or start >= request.num_prompt_tokens:
            return offers
        unwritten = {at for _, at, depth in offers if depth == end}
        if unwritten:
            self._parts.pool.evict_blocks(unwritten)
        return [offer for offer in offers if offer[2] != end]

    def _copies_of(
        self,
        checkpoints: CheckpointManager,
        request: Request,
        offers: Sequence[tuple[int, int, int]],
    ) -> list[CheckpointCopy]:
        layout = self._layout
        by_depth: dict[int, dict[int, int]] = {}
        for group, block_id, tokens in offers:
            by_depth.setdefault(tokens, {})[group] = block_id
        copies = []
        for tokens, blocks in by_depth.items():
            if tokens % layout.block_tokens or len(blocks) != len(layout.state_groups):
                continue  # the end of a prompt inside a block, which the blocks keep
            end = tokens // layout.block_tokens >= layout.end_block(request.num_prompt_tokens)
            between = not end and layout.interval > 0 and tokens % layout.interval == 0
            path = layout.path(request, tokens)
            if not self._hold(path[-1], blocks):
                checkpoints.events.add(MetricKey.SKIPS.of("handed_on"))
                continue
            stored = checkpoints.prepare_store(path, end=end, between=between)
            if stored is not None:
                at = tuple(blocks[group] for group in layout.state_groups)
                copies.append(CheckpointCopy(*stored, at, layout.prefix(path)))
        return copies

    def _hold(self, block_hash: bytes, blocks: Mapping[int, int]) -> bool:
        """Whether these blocks, by group, are still what they were offered as.

        Where steps overlap vLLM offers what a step left behind one pass later. A request that went
        past it, as accepted drafts take it, has given the block back by then, and the same pass may
        have handed it on: this step would write to it before it is copied.
        """
        there = self._parts.pool.cached_block_hash_to_block.contain
        return all(there(seams.key_of(block_hash, group), at) for group, at in blocks.items())

    def complete(self, states: Sequence[int], refused: Sequence[int], *, failed: bool) -> None:
        """The workers report; `failed` if one of them could not store."""
        checkpoints = self._parts.checkpoints
        if checkpoints is None:
            return
        if failed:
            self.faults.count("a worker could not store a state")
            self._parts.end_checkpoints()
        else:
            self._complete(checkpoints, states, refused)

    def _end_checkpoints(self, *_: object) -> None:
        self._parts.end_checkpoints()

    @guarded(_end_checkpoints)
    def _complete(
        self, checkpoints: CheckpointManager, states: Sequence[int], refused: Sequence[int]
    ) -> None:
        checkpoints.complete_store(states, refused)

    def forget(self) -> None:
        """Drop every checkpoint: the weights may have changed."""
        if self._parts.checkpoints is not None:
            self._clear(self._parts.checkpoints)

    @guarded(_end_checkpoints)
    def _clear(self, checkpoints: CheckpointManager) -> None:
        checkpoints.clear()
