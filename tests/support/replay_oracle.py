"""A second replay, written from the counting rules alone: slow, obvious, sharing no code.

A node is the tuple of block ids that leads to it.
"""

from dataclasses import dataclass, field

from statecache import ReferenceCost, ReferenceIndex
from statecache.index.learned_reference import LearnedReference

BLOCK = 512
Node = tuple[int, ...]


@dataclass
class Totals:
    requests: int = 0
    rejected: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    resident_tokens: int = 0
    missed_by_state_tokens: int = 0
    recompute_cost: float = 0.0
    evicted_states: int = 0


@dataclass
class PlainReplay:
    policy: str
    slots: int
    admission: str
    chunk_blocks: int
    kv_blocks: int | None
    totals: Totals = field(default_factory=Totals)

    def __post_init__(self) -> None:
        self.index = (
            LearnedReference(slots=self.slots)
            if self.policy == "learned"
            else ReferenceIndex(self.policy)
        )
        self.kv: dict[Node, int] = {}  # resident node: the request that stamped it last
        self.number_of: dict[Node, int] = {}  # every node that may hold a state
        self.states: set[Node] = set()
        self.served = 0
        self.candidates: set[Node] = set()  # where any request may set a state

    def foresee(self, prompts: list[list[int]]) -> None:
        """Learn where states may be set: `learned` is told of these points alone."""
        for ids in prompts:
            self.candidates |= {tuple(ids[:depth]) for depth in self._admitted(len(ids))}

    def serve(self, ids: list[int]) -> None:
        path = [tuple(ids[:n]) for n in range(1, len(ids) + 1)]
        if self.kv_blocks is not None and len(path) > self.kv_blocks:
            self.totals.rejected += 1
            return
        self.served += 1
        resident = 0
        while resident < len(path) and path[resident] in self.kv:
            resident += 1
        resident = min(resident, len(path) - 1)
        hit = resident
        while hit > 0 and path[hit - 1] not in self.states:
            hit -= 1
        self._count(len(path), resident, hit)
        if self.policy == "learned":
            self._tell(path, resident)
        if hit > 0:
            self.index.touch(self.number_of[path[hit - 1]])
            self.index.pin(self.number_of[path[hit - 1]])
        self._insert_kv(path)
        for depth in self._admitted(len(path)):
            if depth > hit:
                self._set_or_use(path[depth - 1], is_end=depth == len(path))
        if hit > 0:
            self.index.unpin(self.number_of[path[hit - 1]])
        self.index.check()

    def _admitted(self, blocks: int) -> list[int]:
        every = self.chunk_blocks if self.admission == "dense" else blocks
        return [depth for depth in range(1, blocks + 1) if depth % every == 0 or depth == blocks]

    def _tell(self, path: list[Node], resident: int) -> None:
        points = [node for node in path if node in self.candidates]
        self.index.on_prompt(
            [self._number(node) for node in points],
            [len(node) * BLOCK for node in points],
            sum(len(node) <= resident for node in points),
            [self._number(path[depth - 1]) for depth in self._admitted(len(path))],
        )

    def _number(self, node: Node) -> int:
        return self.number_of.setdefault(node, len(self.number_of))

    def _count(self, blocks: int, resident: int, hit: int) -> None:
        self.totals.requests += 1
        self.totals.prompt_tokens += blocks * BLOCK
        self.totals.resident_tokens += resident * BLOCK
        self.totals.hit_tokens += hit * BLOCK
        self.totals.missed_by_state_tokens += (resident - hit) * BLOCK
        self.totals.recompute_cost += ReferenceCost().cost(hit * BLOCK, blocks * BLOCK)

    def _insert_kv(self, path: list[Node]) -> None:
        absent = [node for node in path if node not in self.kv]
        while self.kv_blocks is not None and len(self.kv) + len(absent) > self.kv_blocks:
            parents = {node[:-1] for node in self.kv}
            leaves = [node for node in self.kv if node not in parents and node not in path]
            gone = min(leaves, key=lambda node: self.kv[node])
            del self.kv[gone]
            if gone in self.states:
                self.index.erase(self.number_of[gone])
                self.states.remove(gone)
        for node in path:
            self.kv[node] = self.served

    def _set_or_use(self, node: Node, *, is_end: bool) -> None:
        number = self._number(node)
        if node in self.states:
            self.index.touch(number, end=is_end)
            return
        if len(self.states) == self.slots:
            victims = self.index.evict(1)
            if not victims:
                return
            self.totals.evicted_states += 1
            self.states = {s for s in self.states if self.number_of[s] != victims[0]}
        above = [s for s in self.states if s == node[: len(s)]]
        below = [s for s in self.states if s[: len(node)] == node]
        direct = [s for s in below if not any(s != b and s[: len(b)] == b for b in below)]
        parent = max(above, key=len, default=None)
        self.index.insert(
            number,
            len(node) * BLOCK,
            None if parent is None else self.number_of[parent],
            [self.number_of[s] for s in direct],
            end=is_end,
        )
        self.states.add(node)


def oracle(
    prompts: list[list[int]],
    policy: str,
    slots: int,
    admission: str,
    chunk_blocks: int = 16,
    kv_blocks: int | None = None,
) -> Totals:
    plain = PlainReplay(policy, slots, admission, chunk_blocks, kv_blocks)
    plain.foresee(prompts)
    for ids in prompts:
        plain.serve(ids)
    return plain.totals
