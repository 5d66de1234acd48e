"""What the blocks of states hold, step by step: the worker's rules of vLLM 0.32, without a model.

A step copies the blocks that it is told to; then each request goes on from the state in the column
where its tokens ended and leaves the one after them in the column where they end now. Layers that
can write a state inside a chunk leave that one in the column before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scheduled import GROUPS, Run, exported

State = tuple[int, int]  # how many tokens, and a hash of them
NOTHING = (-1, 0)


def state(tokens: Sequence[int]) -> State:
    return len(tokens), hash(tuple(tokens))


class StateBlocks:
    """Follows one `Run`, in the place of its `step`.

    `names` counts what blocks of states were found to be named for, `unwritten` and `wrong_stores`
    the names and stores of states that nobody wrote there.
    """

    def __init__(self, run: Run, alignment: int | None) -> None:
        self._run, self._alignment = run, alignment
        run.shadow.before = run.shadow.after = lambda *_: None  # it knows the ends of blocks only
        self._held: dict[int, State] = {}
        self._slots: dict[int, State] = {}
        self._promised: dict[bytes, State] = {}
        self._hashes: dict[str, int] = {}  # of a request, how many of its hashes are known
        self._seen: set[tuple[int, bytes]] = set()
        self.names = self.unwritten = self.stores = self.wrong_stores = self.wrong_begins = 0

    def step(self) -> None:
        run, held = self._run, self._held
        requests = dict(run.scheduler.requests)
        planned = run.schedule()
        commands = planned.kv_connector_metadata
        for _, slot, blocks, _ in [] if commands is None else commands.restores:
            held.update(dict.fromkeys(blocks, self._slots[slot]))
        for source, target in planned.kv_cache_block_copies or []:
            held[target] = held.get(source, NOTHING)
        after: dict[int, State] = {}
        for name, count in planned.num_scheduled_tokens.items():
            self._forward(requests[name], count, after)
        held.update(after)
        self._learn_hashes(requests.values())
        for _, slot, blocks, _ in [] if commands is None else commands.stores:
            promised = {self._promise(run.pool.blocks[at].block_hash) for at in blocks}
            self.stores += 1
            self.wrong_stores += {held.get(at, NOTHING) for at in blocks} != promised
            self._slots[slot] = held.get(blocks[0], NOTHING)
        self._check_names()
        run.report(planned)

    def _forward(self, request: Any, count: int, after: dict[int, State]) -> None:
        run, block = self._run, self._run.block
        manager = run.scheduler.kv_cache_manager
        end = request.num_computed_tokens
        start, tokens = end - count, list(request.all_token_ids)
        inside, column = exported(run, end, count, self._alignment, drop_block=False)
        for ids in manager.get_block_ids(request.request_id)[:GROUPS]:
            if start:
                before = self._held.get(ids[(start - 1) // block], NOTHING)
                self.wrong_begins += before != state(tokens[:start])
            if inside:
                after[ids[column]] = state(tokens[: start + inside])
            after[ids[(end - 1) // block]] = state(tokens[:end])

    def _learn_hashes(self, requests: Any) -> None:
        unit = self._run.pool.hash_block_size
        for request in requests:
            known = self._hashes.get(request.request_id, 0)
            for number in range(known, len(request.block_hashes)):
                tokens = request.all_token_ids[: (number + 1) * unit]
                self._promised[request.block_hashes[number]] = state(tokens)
            self._hashes[request.request_id] = len(request.block_hashes)

    def _promise(self, key: bytes | None) -> State | None:
        return None if key is None else self._promised.get(key[:-4])

    def _check_names(self) -> None:
        pool, seen = self._run.pool, set()
        for block in pool.blocks:
            keys = {block.block_hash, *pool.cached_block_hashes_by_block.get(block.block_id, ())}
            for key in keys - {None}:
                if key[-1] < GROUPS:
                    seen.add((block.block_id, key))
        for at, key in seen - self._seen:
            self.names += 1
            self.unwritten += self._held.get(at, NOTHING) != self._promise(key)
        self._seen = seen
