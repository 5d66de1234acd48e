"""The scheduler's half of the connector: the free queue, lookups, and which states to copy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from statecache._blocks import BlockHashIndex, BlockQueue, FifoQueue, ReuseQueue
from statecache.engine.patching import bind_dynamically, detect_overrides
from statecache.engine.settings import Settings
from statecache.errors import exit_engine
from statecache_vllm import seams
from statecache_vllm.checkpoint_memory import pool_slots
from statecache_vllm.checkpoints import CheckpointBook
from statecache_vllm.gds_queue import GdsQueue
from statecache_vllm.guard import (
    Guard,
    GuardedCache,
    GuardedQueue,
    guarded_touch,
    vllms_own_map,
    vllms_own_queue,
)
from statecache_vllm.prefill_chunks import end_chunks, offered_blocks, path_of, settle_interval
from statecache_vllm.proven import ProvenRequests
from statecache_vllm.reporting import Report
from statecache_vllm.seam_table import REPLACED

_log = logging.getLogger("statecache.vllm")

Copy = tuple[int, int, tuple[int, ...]]
_TYPICAL_PROMPT = 512  # tokens; a larger block leaves many prompts nothing to share


class Planner:
    """Sees every lookup, allocation and committed state of one scheduler.

    `queue` is None once vLLM's own has taken its place, `book` once nothing is restored any more.
    """

    def __init__(self, settings: Settings, vllm_config: Any, kv_cache_config: Any) -> None:
        self._settings = settings
        self.guard = Guard()
        self.report = Report(settings, self, kv_cache_config)
        self._states, self._attention, other = seams.groups_of(kv_cache_config)
        self._slots = 0
        if settings.checkpoint_mode is not None:
            if other or not self._states or not self._attention:
                exit_engine(
                    "a checkpoint pool needs a model of full attention and recurrent layers only"
                )
            self._slots = pool_slots(settings, vllm_config, kv_cache_config)
        self._interval = settle_interval(settings, vllm_config.cache_config, kv_cache_config)
        self.end_chunk = end_chunks(self._interval, self.guard)
        self.queue: BlockQueue | None = None
        self._map_failed = False
        self.book: CheckpointBook | None = None
        self._requests: dict[str, Any] = {}
        self._planned: dict[str, Copy] = {}
        self._reached: dict[str, int] = {}  # how far the KV of a lookup went
        self._hit: dict[str, int] = {}  # states that served a lookup from their blocks
        self._restores: list[Copy] = []
        self._guard_calls()

    def _guard_calls(self) -> None:
        wrap = self.guard.wrap
        self._note_lookup = wrap(self._with_checkpoints, self._without_checkpoints)
        self._note_admitted = wrap(self._use_admitted, self._end_book)
        self._note_committed = wrap(self._stores_of, self._no_stores)
        self._note_stored = wrap(lambda book, *report: book.stored(*report), self._end_book)
        self._clear_book = wrap(lambda book: book.clear(), self._end_book)

    def bind(self, manager: Any) -> None:
        """Take the place of the free queue of a new `KVCacheManager`."""
        self._manager = manager
        self._pool = pool = manager.block_pool
        sizes = {one.block_size for one in manager.coordinator.single_type_managers}
        self._block = max(sizes)
        hashes = self._block // pool.hash_block_size
        self._path = path_of(self._block, hashes)
        self._proven = ProvenRequests(self._block, hashes)
        self._kv_endings = tuple(seams.key_of(b"", group) for group in self._attention)
        if self._slots:
            if len(sizes) > 1:
                exit_engine(f"a checkpoint pool needs one block size, not {sizes}")
            self.book = CheckpointBook(self._settings, self._slots, self._block, self._told)
        self.queue = self._new_queue()
        if self.queue is not None:
            self._take_over(self.queue)
        self.report.watch(manager)
        _log.info(
            "statecache: block order %s; %d blocks of %d tokens; %d checkpoints, %s tokens apart",
            self._settings.block_order,
            pool.get_num_free_blocks(),
            self._block,
            self._slots,
            self._interval or "(none)",
        )
        level = logging.WARNING if self._block > _TYPICAL_PROMPT else logging.INFO
        smallest = "statecache: the smallest prefix that can be reused is %d tokens"
        _log.log(level, smallest, self._block)

    # What happens when a part of the plugin fails.

    def _end_book(self, *_: object) -> None:
        """Nothing is stored or restored any more. What was already planned for this step is."""
        self.book = None
        self._hit.clear()
        if self.queue is not None:
            self.guard.wrap(self._cached.clear_checkpoints, lambda: None)()

    def _hand_over(self, *_: object) -> Any:
        """Give the pool vLLM's own queue; return it."""
        if self.queue is not None:
            self.queue = None
            self._end_book()
            vllms_own_queue(self._pool)
        return self._pool.free_block_queue

    def _hand_over_map(self) -> Any:
        """Give the pool vLLM's own map and return it. The queue, which reads ours, goes later.

        Now `BlockPool.get_new_blocks` may hold blocks that look free.
        """
        self._map_failed = True
        if isinstance(self._pool.cached_block_hash_to_block, GuardedCache):
            vllms_own_map(self._pool)
        return self._pool.cached_block_hash_to_block

    def _make_way(self) -> None:
        """Before the next step: finish what failed, and let in what others put into vLLM's own."""
        if self.queue is not None and not self._map_failed:
            changed = self._changed()
            if changed is None:
                return
            self.guard.count(f"another plugin changed {changed}")
            self._hand_over_map()
        if self._map_failed:
            self._hand_over()

    def _new_queue(self) -> BlockQueue | None:
        """Return the queue of the order, None where vLLM's own does all that is asked for."""
        if self._settings.block_order == "stock" and self.book is None:
            return None
        self._cached = BlockHashIndex(self._pool.blocks)
        if self._settings.block_order == "reuse":
            return ReuseQueue(self._cached, self._kv_endings[0] if self._kv_endings else b"")
        if self._settings.block_order == "gds":
            endings = [seams.key_of(b"", group) for group in self._states]
            return GdsQueue(self._cached, self._settings, self._block, endings)
        return FifoQueue(self._cached)

    def _take_over(self, queue: BlockQueue) -> None:
        pool, manager = self._pool, self._manager
        own = pool.free_block_queue
        seams.put_cache(pool, GuardedCache(self._cached, self.guard, self._hand_over_map))
        queue.append_n(own.popleft_n(own.num_free_blocks))
        if self.book is not None:
            queue.lost = self.guard.wrap(self._lost, self._end_book)
        pool.free_block_queue = GuardedQueue(queue, self.guard, self._hand_over)
        pool.touch = guarded_touch(pool, queue, self.guard, self._hand_over)
        pool.reset_prefix_cache = self._reset(bind_dynamically(pool, "reset_prefix_cache"))
        pool.evict_blocks = self._evict_blocks(bind_dynamically(pool, "evict_blocks"))
        manager.get_computed_blocks = self._lookup(bind_dynamically(manager, "get_computed_blocks"))
        if isinstance(queue, ReuseQueue):
            allocate = bind_dynamically(manager, "allocate_slots")
            manager.allocate_slots = self._proven.around_allocate(allocate, queue)
        self._changed = detect_overrides(s.target for s in REPLACED if s.replaced)

    # What vLLM does to the pool.

    def _reset(self, original: Callable[[], bool]) -> Callable[[], bool]:
        """Around `BlockPool.reset_prefix_cache`, which never tells the connector (vLLM 0.32)."""

        def refill(queue: BlockQueue) -> None:
            self._cached.clear()
            guarded = GuardedCache(self._cached, self.guard, self._hand_over_map)
            seams.put_cache(self._pool, guarded)
            queue.reset()

        guarded_refill = self.guard.wrap(refill, self._hand_over)

        def reset_prefix_cache() -> bool:
            done = original()
            if self._map_failed:
                self._hand_over()
            if done:
                self.forget()
                if self.queue is not None:
                    guarded_refill(self.queue)
            return done

        return reset_prefix_cache

    def _evict_blocks(self, original: Callable[[set[int]], None]) -> Callable[[set[int]], None]:
        """Around `BlockPool.evict_blocks`, which clears hashes of blocks that are queued."""

        def gone(queue: BlockQueue, hashed: list[tuple[Any, Any]]) -> None:
            for block, key in hashed:
                queue.unhashed(block)
                if queue.lost is not None and key not in self._cached:
                    queue.lost(key)

        guarded_gone = self.guard.wrap(gone, self._hand_over)

        def evict_blocks(block_ids: set[int]) -> None:
            blocks = self._pool.blocks
            own = [blocks[index] for index in sorted(block_ids) if index < len(blocks)]
            hashed = [(block, block.block_hash) for block in own if block.block_hash is not None]
            original(block_ids)
            if self.queue is not None:
                guarded_gone(self.queue, hashed)

        return evict_blocks

    def _lost(self, key: bytes) -> None:
        if key.endswith(self._kv_endings) and self.book is not None:
            self.book.kv_gone(seams.plain_hash(key))

    def _told(self, block_hash: bytes, resident: bool) -> None:
        if self.queue is None:
            return
        for group in self._states:
            self._cached.set_has_checkpoint(seams.key_of(block_hash, group), resident)

    # Lookups.

    def _lookup(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Around `KVCacheManager.get_computed_blocks`; vLLM repeats it until admission."""
        learn = self.guard.wrap(self._proven.looked_up, self._hand_over)

        def again(request: Any) -> Any:
            self._hand_over_map()
            return original(request)

        look_up = self.guard.wrap(original, again)

        def get_computed_blocks(request: Any) -> Any:
            found = look_up(request)
            self._planned.pop(request.request_id, None)
            if not self._manager.prefix_cache_lookup_enabled(request):
                return found
            if self.book is not None:
                found = self._note_lookup(self.book, request, found)
            if isinstance(self.queue, ReuseQueue):
                learn(self.queue, request, found)
            return found

        return get_computed_blocks

    def _with_checkpoints(self, book: CheckpointBook, request: Any, found: Any) -> Any:
        self._reached[request.request_id] = max(found[1], found[2])
        if found[2] > found[1]:
            found = self._with_restore(book, request, found)
        if request.request_id not in self._planned:
            self._note_hit(book, request, found[1])
        return found

    def _without_checkpoints(self, _: CheckpointBook, request: Any, found: Any) -> Any:
        self._planned.pop(request.request_id, None)
        self._end_book()
        return found

    def _note_hit(self, book: CheckpointBook, request: Any, tokens: int) -> None:
        """A checkpoint is used, too, when its state is served from blocks."""
        self._hit.pop(request.request_id, None)
        if tokens and tokens % self._block == 0:
            state = book.tree.find(request.block_hashes[tokens // self._pool.hash_block_size - 1])
            if state is not None:
                self._hit[request.request_id] = state

    def _with_restore(self, book: CheckpointBook, request: Any, found: Any) -> Any:
        """Return the hit that a checkpoint makes possible, or `found`.

        The blocks are free until the request is admitted, as those of any hit: nothing else is
        handed out in between, and a request that is not admitted is looked up again.
        """
        pool, block = self._pool, self._block
        _, hit, resident = found
        best = book.deepest(self._path(request, resident), hit // block)
        if best is None:
            return found
        state, slot = best
        depth = book.tree.depth_of(state)
        by_group, hits = self._manager.coordinator.find_longest_cache_hit_per_group(
            request.block_hashes, request.num_tokens - 1
        )
        if any(hits[group] < depth * block for group in self._attention):
            return found
        kv = {group: list(by_group[group][:depth]) for group in self._attention}
        kept = [one for blocks in kv.values() for one in blocks]
        fresh = seams.fresh_blocks(pool, len(self._states), kept)
        if fresh is None or self.book is None or state not in book.tree:
            return found
        null = [pool.null_block] * (depth - 1)
        taken = dict(zip(self._states, fresh, strict=True))
        every = sorted([*self._attention, *self._states])
        groups = [kv[group] if group in kv else [*null, taken[group]] for group in every]
        ids = tuple(one.block_id for one in fresh)
        self._planned[request.request_id] = (state, slot, ids)
        tokens = depth * block
        return seams.kv_blocks(groups), tokens, resident if resident > tokens else 0

    # What the connector hears.

    def added(self, request: Any) -> None:
        """A request was added."""
        self._requests[request.request_id] = request

    def finished(self, request: Any) -> None:
        """A request ended, for whatever reason."""
        name = request.request_id
        self._requests.pop(name, None)
        self.report.finished(name, last=not self._requests)
        self._planned.pop(name, None)
        self._reached.pop(name, None)
        self._hit.pop(name, None)
        self._proven.finished(name)

    def admitted(self, request: Any, blocks: Any) -> None:
        """A request got its blocks: the restore planned for it will run in this step."""
        planned = self._planned.pop(request.request_id, None)
        self.report.admitted(request)
        if planned is not None:
            self._restores.append(planned)
            held = [{one.block_id for one in blocks.blocks[group]} for group in self._states]
            if any(at not in own for at, own in zip(planned[2], held, strict=True)):
                # Not guarded: the request must not go on from a block without its state.
                raise RuntimeError("statecache: vLLM did not take the block of a restored state")
        self._note_admitted(request, self._hit.pop(request.request_id, None), planned)

    def _use_admitted(self, request: Any, hit: int | None, planned: Copy | None) -> None:
        if self.book is None:
            return
        if self._settings.policy == "learned":
            tokens = request.num_tokens
            path, reached = self._path(request, tokens), self._reached.pop(request.request_id, 0)
            offered = offered_blocks(self._interval // self._block, len(path))
            self.book.tree.requested(path, tokens, offered, reached)
        if hit is not None and hit in self.book.tree:
            self.book.tree.use(hit)
        if planned is not None:
            self.book.restored(planned[0])

    def plan(self, block_state: Any) -> tuple[list[Copy], list[Copy]]:
        """Return the restores and stores of this step."""
        self._make_way()
        restores, self._restores = self._restores, []
        if self.book is None and not isinstance(self.queue, GdsQueue):
            return restores, []
        return restores, self._note_committed(block_state)

    def _no_stores(self, *_: object) -> list[Copy]:
        """States are told to the book or, without one, to the queue: that one failed."""
        if self.book is None:
            self._hand_over()
        self._end_book()
        return []

    def _stores_of(self, block_state: Any) -> list[Copy]:
        stores: list[Copy] = []
        offered = block_state.boundary_state_offloads if block_state is not None else {}
        for name, offers in offered.items():
            request = self._requests.get(name)
            if request is not None:
                self._plan_stores(request, offers, stores)
        return stores

    def _plan_stores(self, request: Any, offers: Any, stores: list[Copy]) -> None:
        by_depth: dict[int, dict[int, int]] = {}
        for group, block_id, tokens in offers:
            by_depth.setdefault(tokens, {})[group] = block_id
        for tokens, blocks in by_depth.items():
            if tokens % self._block or len(blocks) != len(self._states):
                continue  # the end of a prompt inside a block, which the blocks keep
            path = self._path(request, tokens)
            if isinstance(self.queue, GdsQueue):
                self.queue.set_at(path)
            made = None
            if self.book is not None:
                end = tokens >= request.num_prompt_tokens // self._block * self._block
                between = not end and self._interval > 0 and tokens % self._interval == 0
                made = self.book.store(path, end=end, between=between)
            if made is not None:
                stores.append((*made, tuple(blocks[group] for group in self._states)))

    def stored(self, states: Sequence[int], refused: Sequence[int], *, failed: bool) -> None:
        """The workers report; `failed` if one of them could not store."""
        if failed and self.book is not None:
            self.guard.count("a worker could not store a state")
            self._end_book()
        elif self.book is not None:
            self._note_stored(self.book, states, refused)

    def forget(self) -> None:
        """Drop every checkpoint: the weights may have changed."""
        self._planned.clear()
        self._reached.clear()
        self._hit.clear()
        if self.book is not None:
            self._clear_book(self.book)
