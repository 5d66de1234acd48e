"""Speculative decoding on vLLM's real scheduler: every state carries a hash of its prefix.

The worker's rules are those of vLLM 0.32 (`v1/worker/mamba_utils.py`). A step of a request that
ends in column `c` of its blocks of states writes, for a sampled token and `k` drafts, the state
after each of them: the temporal ones to columns `c` to `c + k`, the convolution's, which is `k`
tokens wider, to `c` alone. Before the forward the state after the last accepted token goes to `c`;
after sampling the one at a block's end goes to the column of that block. What lies in a slot, and
what a request goes on from, is compared with its prefix each time.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from scheduled import GROUPS, Run, exported, words
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from statecache.index.keyed_index import key_of

# What the workers, or the adapter, could do wrong.
STORED_EARLY = "states stored before the tokens were sampled: those after the drafts"
OLD_COUNT = "the count of accepted tokens of the step before"
DRAFTERS_BLOCKS = "the numbers of the drafter's blocks in the place of the states'"
OTHER_ROWS = "the counts in the order of the rows of another step"
FAULTS = (STORED_EARLY, OLD_COUNT, DRAFTERS_BLOCKS, OTHER_ROWS)
_WRONG, VOCABULARY = -1, 300


class Held(NamedTuple):
    """What a block of states holds: the mark of its temporal state, and of each convolution's."""

    temporal: int = _WRONG
    convolution: tuple[int, ...] = (_WRONG,)

    def is_(self, mark: int) -> bool:
        """Whether a request that goes on from this block does so from the state with this mark."""
        return self.temporal == mark == self.convolution[0]

    def after(self, accepted: int) -> Held:
        """The same block, read after so many further tokens; its temporal state lies elsewhere."""
        return Held(self.temporal, self.convolution[accepted:] or (_WRONG,))


class Prefixes:
    """The marks of one request: a hash of each of its prefixes, one token after the other."""

    def __init__(self) -> None:
        self._marks = [0]

    def of(self, tokens: Sequence[int], count: int) -> int:
        """The mark of the first `count` of `tokens`, which only grow."""
        for at in range(len(self._marks) - 1, count):
            self._marks.append(hash((self._marks[-1], tokens[at])))
        return self._marks[count]


class _Planned(NamedTuple):
    step: Any
    blocks: dict[str, tuple[list[int], ...]]
    begun: dict[str, tuple[int, list[int]]]


class DraftedWorker:
    """The workers of one `Run`, whose states are marks; `step` takes the place of its own.

    A draft is accepted with the chance `accept`, and the ones behind it only then. `late` delivers
    the report of a step with that of the next one. `wrong` counts what was not as it should be, by
    what it was: named, stored, restored, begun from.
    """

    def __init__(
        self,
        run: Run,
        drafts: int,
        accept: float,
        seed: int = 0,
        *,
        fault: str | None = None,
        late: bool = False,
        alignment: int | None = None,
    ) -> None:
        run.shadow.before = run.shadow.after = lambda *_: None
        self._run, self._drafts, self._accept = run, drafts, accept
        self._fault, self._late, self._alignment = fault, late, alignment
        self._rng, self._overlap = random.Random(seed), int(run.overlapped)
        self._ahead: list[_Planned] = []
        self._table: dict[str, tuple[list[int], ...]] = {}
        self._tokens: dict[str, list[int]] = {}
        self._computed: dict[str, int] = {}
        self._drafted: dict[str, list[int]] = {}
        self._unreported: tuple[int, ...] = ()
        self._held: dict[int, Held] = {}
        self._slots: dict[int, list[Held]] = {}
        self._promised: dict[int, int] = {}  # by key of a block hash, the mark of its prefix
        self._prefixes: dict[str, Prefixes] = {}
        self._hashed: dict[str, tuple[Prefixes, int]] = {}
        self._column: dict[str, int] = {}  # where the running state of a request is
        self._accepted: dict[str, int] = {}  # of a request's last step, with the sampled token
        self._of_requests = (self._column, self._accepted, self._tokens, self._computed)
        self._of_requests += (self._drafted, self._prefixes)
        self._rows: list[str] = []
        self._named: set[tuple[int, bytes]] = set()
        self.names = self.stores = self.restores = self.begins = self.drafted = self.kept = 0
        self.preempted = 0
        self.wrong: dict[str, int] = {}

    def __str__(self) -> str:
        return (
            f"{self.stores:,} states stored, {self.restores:,} restored, {self.begins:,} begun"
            f" from, {self.kept:,} of {self.drafted:,} drafts accepted, {self.preempted:,}"
            f" preempted, wrong: {sum(self.wrong.values())}"
        )

    def _compare(self, what: str, held: Held, mark: int) -> None:
        if not held.is_(mark):
            self.wrong[what] = self.wrong.get(what, 0) + 1

    def step(self, *, look_at_names: bool = False) -> Any:
        """One step of the engine; returns what was planned.

        Where steps overlap, the one before is carried out once this one is planned.
        """
        run = self._run
        requests = dict(run.scheduler.requests)
        planned = run.schedule()
        self.preempted += len(planned.preempted_req_ids or ())
        for name in planned.finished_req_ids:
            self._hashed.pop(name, None)
        self._learn(requests)
        blocks = {name: self._blocks(name) for name in planned.num_scheduled_tokens}
        self._ahead.append(_Planned(planned, blocks, self._begun(planned, requests)))
        while len(self._ahead) > self._overlap or (self._ahead and not blocks):
            self._carry_out(*self._ahead.pop(0), look_at_names=look_at_names)
        return planned

    def _begun(self, planned: Any, requests: dict[str, Any]) -> dict[str, tuple[int, list[int]]]:
        """Of each request that begins, or begins again: where, and its tokens."""
        cached = planned.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in planned.scheduled_new_reqs}
        again = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        starts |= {name: at for name, at in again if name in cached.resumed_req_ids}
        return {name: (at, list(requests[name].all_token_ids)) for name, at in starts.items()}

    def _carry_out(
        self,
        planned: Any,
        blocks: dict[str, tuple[list[int], ...]],
        begun: dict[str, tuple[int, list[int]]],
        *,
        look_at_names: bool,
    ) -> None:
        """What the workers do with a step, and what the scheduler makes of their output."""
        self._table = blocks
        for name in {*planned.finished_req_ids, *(planned.preempted_req_ids or ()), *begun}:
            for kept in self._of_requests:
                kept.pop(name, None)
        for name, (start, tokens) in begun.items():
            self._computed[name], self._tokens[name] = start, tokens
            self._prefixes[name] = Prefixes()
        commands = planned.kv_connector_metadata
        for copy in [] if commands is None else commands.restores:
            self.restores += 1
            for at, held in zip(copy.blocks, self._slots[copy.slot], strict=True):
                self._compare("restored", held, self._promised[copy.prefix.key])
                self._held[at] = held
        for source, target in planned.kv_cache_block_copies or []:
            self._held[target] = self._held.get(source, Held())
        drafts = {  # a request that begins again may have none yet, and is asked to verify some
            name: [*self._drafted.get(name, []), *[_WRONG] * len(asked)][: len(asked)]
            for name, asked in planned.scheduled_spec_decode_tokens.items()
        }
        for name, count in planned.num_scheduled_tokens.items():
            self._forward(name, count, drafts.get(name, []))
        stores = [] if commands is None else commands.stores
        if self._fault == STORED_EARLY:
            self._store(stores)
        sampled = self._sample(planned, drafts)
        if self._fault != STORED_EARLY:
            self._store(stores)
        if look_at_names and not self._overlap:  # else the next step has named what it will write
            self._look_at_names()
        requests = dict(self._run.scheduler.requests)
        self._hand_back(planned, sampled, stores)
        self._learn(requests)

    def _learn(self, requests: dict[str, Any]) -> None:
        """Note which prefix each block hash stands for."""
        unit = self._run.pool.hash_block_size
        for name, request in requests.items():
            marks, known = self._hashed.setdefault(name, (Prefixes(), 0))
            for number in range(known, len(request.block_hashes)):
                mark = marks.of(request.all_token_ids, (number + 1) * unit)
                self._promised[key_of(request.block_hashes[number])] = mark
            self._hashed[name] = marks, len(request.block_hashes)

    def forget(self) -> None:
        """Forget the marks of what is neither cached nor being computed any more."""
        run, checkpoints = self._run, self._run.scheduler_side.checkpoints
        kept = {block.block_hash for block in run.pool.blocks} - {None}
        for several in run.pool.cached_block_hashes_by_block.values():
            kept.update(several)
        for request in run.scheduler.requests.values():
            kept.update(request.block_hashes)
        if checkpoints is not None:
            kept.update(map(checkpoints.tree.hash_of, checkpoints.tree_states()))
        keys = set(map(key_of, kept))
        self._promised = {key: mark for key, mark in self._promised.items() if key in keys}

    def _blocks(self, name: str) -> tuple[list[int], ...]:
        return self._run.scheduler.kv_cache_manager.get_block_ids(name)

    def _copy(self, name: str, source: int, target: int, accepted: int) -> None:
        """Bring the state after `accepted` tokens more than column `source` has to `target`."""
        for ids in self._table[name][:GROUPS]:
            base = self._held.get(ids[source], Held()).after(accepted)
            temporal = self._held.get(ids[source + accepted], Held()).temporal
            self._held[ids[target]] = Held(temporal, base.convolution)

    def _forward(self, name: str, count: int, drafts: Sequence[int]) -> None:
        block, start = self._run.block, self._computed[name]
        end, marks, tokens = start + count, self._prefixes[name], self._tokens[name]
        before, column = self._column.get(name, (start - 1) // block), (end - 1) // block
        accepted = self._accepted.get(name, 1)
        if before not in (-1, column):
            self._copy(name, before, column, accepted - 1)
            accepted = 1
        self._column[name], self._accepted[name] = column, accepted
        written = [marks.of(tokens, end - len(drafts))]
        for draft in drafts:
            written.append(hash((written[-1], draft)))
        for ids in self._table[name][:GROUPS]:
            if start:
                self.begins += 1
                convolution = self._held.get(ids[column], Held()).after(accepted - 1).convolution
                temporal = self._held.get(ids[column + accepted - 1], Held()).temporal
                self._compare("begun from", Held(temporal, convolution), marks.of(tokens, start))
            for number, mark in enumerate(written):
                convolution = tuple(written) if number == 0 else (_WRONG,)
                self._held[ids[column + number]] = Held(mark, convolution)
        for ids in self._table[name][GROUPS:]:  # KV is written over whatever a block held
            self._held.update(dict.fromkeys(ids[start // block : column + 1], Held()))
        self._export(name, start, end)

    def _export(self, name: str, start: int, end: int) -> None:
        """Layers that can write a state inside a chunk leave it in the column before."""
        drop_block = self._run.scheduler.kv_cache_manager.use_eagle
        inside, column = exported(
            self._run, end, end - start, self._alignment, drop_block=drop_block
        )
        if inside:
            mark = self._prefixes[name].of(self._tokens[name], start + inside)
            for ids in self._table[name][:GROUPS]:
                self._held[ids[column]] = Held(mark, (mark,))

    def _sample(self, planned: Any, drafted: dict[str, list[int]]) -> dict[str, list[int]]:
        """Accept drafts, and bring the state at the end of a block to its column."""
        sampled: dict[str, list[int]] = {}
        for name, count in planned.num_scheduled_tokens.items():
            drafts = drafted.get(name, [])
            if self._computed[name] + count - len(drafts) < len(self._tokens[name]):
                sampled[name] = []
                continue
            right = [draft != _WRONG and self._rng.random() < self._accept for draft in drafts]
            kept = [*right, False].index(False)
            self.drafted, self.kept = self.drafted + len(drafts), self.kept + kept
            sampled[name] = [*drafts[:kept], self._rng.randrange(3, VOCABULARY)]
        rows = self._rows if self._fault == OTHER_ROWS else list(sampled)
        for row, (name, count) in enumerate(planned.num_scheduled_tokens.items()):
            there = rows[row] if row < len(rows) and rows[row] in sampled else name
            drafts = len(drafted.get(name, []))
            accepted = min(max(len(sampled[there]), 1), drafts + 1)
            self._settle(name, self._computed[name] + count - drafts, drafts, accepted)
            self._computed[name] += count - drafts + max(len(sampled[name]) - 1, 0)
            self._tokens[name] += sampled[name]
            self._drafted[name] = words(self._rng, self._drafts)
        self._rows = list(sampled)
        return sampled

    def _settle(self, name: str, running: int, drafts: int, accepted: int) -> None:
        block, column = self._run.block, self._column[name]
        before, self._accepted[name] = self._accepted[name], accepted
        if self._fault == OLD_COUNT:
            accepted = min(before, drafts + 1)
        aligned = (running + accepted - 1) // block * block
        if aligned < running:
            return
        target, further = aligned // block - 1, aligned - running
        if target == column:
            self._accepted[name] = 1
        if target != column or further:
            self._copy(name, column, target, further)

    def _store(self, stores: Iterable[Any]) -> None:
        for copy in stores:
            blocks = copy.blocks
            if self._fault == DRAFTERS_BLOCKS:
                (ids,) = [ids for ids in self._table.values() if blocks[0] in ids[0]]
                blocks = [ids[GROUPS][ids[0].index(blocks[0])]] * GROUPS
            self.stores += 1
            self._slots[copy.slot] = [self._held.get(at, Held()) for at in blocks]
            for held in self._slots[copy.slot]:
                self._compare("stored", held, self._promised[copy.prefix.key])

    def _look_at_names(self) -> None:
        pool, seen = self._run.pool, set()
        for block in pool.blocks:
            keys = {block.block_hash, *pool.cached_block_hashes_by_block.get(block.block_id, ())}
            seen |= {(block.block_id, key) for key in keys - {None} if key[-1] < GROUPS}
        for at, key in seen - self._named:
            self.names += 1
            self._compare("named", self._held.get(at, Held()), self._promised[key_of(key)])
        self._named = seen

    def _hand_back(self, planned: Any, sampled: dict[str, list[int]], stores: Any) -> None:
        """The scheduler's own processing of results, then the drafts of the next step."""
        from statecache_vllm.connector import Stored

        stored = tuple(copy.state for copy in stores)
        report, self._unreported = (self._unreported, stored) if self._late else (stored, ())
        names = list(sampled)
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: row for row, name in enumerate(names)},
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=KVConnectorOutput(kv_connector_worker_meta=Stored(report, ())),
        )
        scheduler = self._run.scheduler
        scheduler.update_from_output(planned, output)
        if not self._overlap:
            drafts = [self._drafted.get(name, []) for name in names]
            scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))


def conversations(
    run: Run, worker: DraftedWorker, seed: int, *, scale: int = 1, look_at_names: bool = False
) -> Iterator[None]:
    """Prompts that part anywhere and turns that go on from answers, some aborted; never ends.

    Many end inside an accepted run of drafts: at a token that ends them, or as they are long
    enough. Now and then the cache is reset, requests and all.
    """
    rng = random.Random(seed)
    heads = [words(rng, scale * rng.randint(30, 160)) for _ in range(4)]
    live: dict[str, Any] = {}
    while True:
        if rng.random() < 0.35 and len(live) < 10:
            head = rng.choice(heads)
            prompt = head[: rng.randint(len(head) // 2, len(head))]
            prompt = [*prompt, *words(rng, scale * rng.choice((1, 6, 40)))]
            stop = words(rng, 3) if rng.random() < 0.5 else ()
            name = run.add(prompt, tokens=rng.choice((1, 2, 9, 40)), stop=stop)
            live[name] = run.scheduler.requests[name]
        if live and rng.random() < 0.02:
            run.scheduler.finish_requests([rng.choice(list(live))], RequestStatus.FINISHED_ABORTED)
        if rng.random() < 0.0005:
            run.scheduler.reset_prefix_cache(reset_running_requests=True)
        worker.step(look_at_names=look_at_names)
        for name in [name for name in live if name not in run.scheduler.requests]:
            request = live.pop(name)
            if rng.random() < 0.4 and request.num_tokens < scale * 400:
                heads[rng.randrange(len(heads))] = list(request.all_token_ids)
        if rng.random() < 0.01:
            heads[rng.randrange(len(heads))] = words(rng, scale * rng.randint(30, 160))
        yield
