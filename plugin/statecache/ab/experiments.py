"""Ready-made tests, each with its arms, workload and sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from statecache.ab.arms import POOLS, REPLAY, Arm, admissions_of, arm_engines, policies_of
from statecache.ab.statistics import default_repeats
from statecache.ab.trial import Cell
from statecache.ab.workloads import Workload
from statecache.engine.spec import engines as engine_specs
from statecache.errors import SettingsError, escape_control_chars
from statecache.index import policies
from statecache.trace.format import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["EXPERIMENTS", "Experiment", "engines_of"]


class _Kind(NamedTuple):
    """What an experiment is: the pools an engine must have and must not have to be run on it.

    `axis` is that of its plot, `warm_up` the part of the requests that is not counted. With
    `compares` it is for all its engines at once, and not for the replay; with `tuned` for engines
    whose users tune them. `trace` says whether it plays a recorded one.
    """

    axis: str
    warm_up: float
    pools: frozenset[str] = frozenset({"native"})
    without: frozenset[str] = frozenset()
    compares: bool = False
    tuned: bool = False
    trace: Literal["must", "may", "none"] = "none"
    note: str = ""


EXPERIMENTS = {
    "sessions": _Kind(
        "agent sessions at once",
        0.1,
        note="419 state slots and 2,969,600 tokens of KV; each session runs one request at all"
        " times, which keeps 5 slots. In an engine with one pool for KV and states the slots are"
        " those of a checkpoint pool.",
    ),
    "distinct-prefixes": _Kind(
        "distinct prefixes",
        0.2,  # the first round
        frozenset({"native", "int8"}),
        note="256 slots of native states, or 512 of int8 ones in the same bytes. All states cost"
        " the same, so no policy can gain here. KV holds one round of 768 prefixes: with more of it"
        " an engine with one pool would keep the states among the blocks and find them there too.",
    ),
    "agent-traces": _Kind("state slots", 0.0, without=frozenset({"shared"}), trace="must"),
    "one-pool": _Kind("blocks of the pool", 0.1, frozenset({"native", "int8", "shared"})),
    "engines": _Kind(
        "blocks of 512 tokens of memory in all",
        0.1,
        frozenset({"native", "int8"}),
        compares=True,
        note="The same bytes for all arms: a state takes as many as three blocks. By design",
    ),
    "tuned": _Kind(
        "state slots",
        0.0,
        frozenset({"native", "int8"}),
        tuned=True,
        trace="may",
        note="The engine alone, alone as its users tune it, and with the plugin, in the same bytes;"
        " KV is ample. 64 agent sessions of 40 turns, and with --trace the first 1,500 requests of"
        " that.",
    ),
}
_SESSIONS = (16, 24, 32, 40, 64)
_PREFIXES = (128, 256, 384, 512, 640, 768)
_TRACE_SLOTS = (32, 64, 128, 256, 384, 1024)
_TUNED_SLOTS = (32, 64, 128)
_POOL_BLOCKS = (1024, 2048, 3072)
_KV_TOKENS = 2_969_600
_ROUND_KV_TOKENS = 768 * 3 * 512  # a round of the most prefixes, each with an end of its own
_AMPLE_KV_TOKENS = 512 * 2**20
_BEST_SHARED = "reuse"


def engines_of(name: str) -> tuple[str, ...]:
    """Return what an experiment can be run on: the replay, if it can, and engines."""
    kind = EXPERIMENTS[name]
    return tuple(engine for engine in arm_engines() if _runs_on(engine, kind))


class Experiment:
    """An experiment by name, on some of its engines."""

    def __init__(self, name: str, engines: str | None = None, trace: str | None = None) -> None:
        """Check what was asked for. Raises `SettingsError`."""
        if name not in EXPERIMENTS:
            known = ", ".join(EXPERIMENTS)
            raise SettingsError(
                escape_control_chars(f"--experiment: unknown {name!r}: use {known}")
            )
        self.name = name
        self._kind = EXPERIMENTS[name]
        self._engines = self._chosen(engines)
        self._trace = trace
        if self._kind.trace == "must" and trace is None:
            raise SettingsError(f"--experiment: {name} plays a recorded trace: give --trace FILE")
        if self._kind.trace == "none" and trace is not None:
            raise SettingsError(f"--trace: {name} makes its own workload: leave it out")

    @property
    def axis(self) -> str:
        """What its cells differ in."""
        return self._kind.axis

    @property
    def warm_up(self) -> float:
        """The part of the requests that is not counted."""
        return self._kind.warm_up

    @property
    def notes(self) -> list[str]:
        """What a reader of the report must know."""
        if not self._kind.note:
            return []
        notes = [
            engine_specs()[engine].arms_note for engine in self._engines if self._kind.compares
        ]
        return [" ".join([self._kind.note, *notes])]

    @property
    def repeats(self) -> int:
        """How many seeds are run unless said otherwise: as many as on all its engines.

        So a part of the engines gives the same numbers as all of them.
        """
        everywhere = Experiment(self.name, ",".join(engines_of(self.name)), self._trace).cells()
        pairs = sum(len(cell.pairs) for cell in everywhere if cell.seeded)
        return default_repeats(pairs) if pairs else 1

    def cells(self) -> list[Cell]:
        """Return the cells, in the order of the axis."""
        kinds: dict[str, tuple[Callable[[int], Cell], Sequence[int]]] = {
            "sessions": (self._sessions, _SESSIONS),
            "distinct-prefixes": (self._prefixes, _PREFIXES),
            "agent-traces": (self._agent_traces, _TRACE_SLOTS),
            "one-pool": (self._one_pool, _POOL_BLOCKS),
            "engines": (self._side_by_side, _POOL_BLOCKS),
            "tuned": (self._tuned, _TUNED_SLOTS),
        }
        cell, sizes = kinds[self.name]
        cells = [cell(size) for size in sizes]
        return cells + self._on_trace(cells) if self.name == "tuned" else cells

    def _chosen(self, engines: str | None) -> list[str]:
        known = engines_of(self.name)
        if engines is None:
            engines = ",".join(known) if self._kind.compares else known[0]
        chosen = list(dict.fromkeys(part.strip() for part in engines.split(",")))
        for engine in chosen:
            if engine not in known:
                raise SettingsError(
                    escape_control_chars(
                        f"--engines: {self.name} does not run on {engine!r}: use {', '.join(known)}"
                    )
                )
        if self._kind.compares and set(chosen) != set(known):
            both = " and ".join(known)
            raise SettingsError(f"--engines: {self.name} compares {both}: leave it out")
        return chosen

    def _sessions(self, sessions: int) -> Cell:
        """Lru against others where `sessions` requests run at all times and keep 5 slots each."""
        sizes = {"slots": 419, "kv_tokens": _KV_TOKENS, "running": sessions}
        arms = []
        for engine in self._engines:
            arms += _against_first([*_policies(engine, sizes), *_tuned(engine, sizes)])
        workload = Workload(kind="agent", sessions=sessions, turns=16, loop="closed")
        return Cell(name=f"{sessions} sessions", workload=workload, arms=arms, at=sessions)

    def _prefixes(self, count: int) -> Cell:
        """Prefixes in a cycle: 256 native states against 512 int8 ones in the same bytes."""
        arms = []
        for engine in self._engines:
            pair = []
            for pool in ("native", "int8"):
                arm = Arm(
                    name=f"{engine} {pool}",
                    engine=engine,
                    policy=policies.BASELINE,
                    pool=pool,
                    slots=256,
                    int8_ratio=2,
                    kv_tokens=_ROUND_KV_TOKENS,
                    admission="aligned" if "aligned" in admissions_of(engine, pool) else "dense",
                    chunk=1024,
                )
                pair.append(arm)
            arms += _against_first(pair)
        workload = Workload(kind="distinct-prefixes", count=count, rounds=5)
        return Cell(name=f"{count} prefixes", workload=workload, arms=arms, at=count)

    def _agent_traces(self, slots: int) -> Cell:
        arms = []
        for engine in self._engines:
            sizes = {"slots": slots, "kv_tokens": 0 if engine == REPLAY else _AMPLE_KV_TOKENS}
            place = policies.REPLAY if engine == REPLAY else policies.ENGINE
            arms += _against_first([*_policies(engine, sizes, place=place), *_tuned(engine, sizes)])
        workload = Workload(kind="trace", file=self._trace)
        return Cell(name=f"{slots} slots", workload=workload, arms=arms, at=slots)

    def _one_pool(self, blocks: int) -> Cell:
        """One pool of blocks of 512 tokens, a tenth of it for states, at equal bytes."""
        sizes = _tenth_for_states(blocks)
        arms = []
        for engine in self._engines:
            compared = [
                Arm(name=f"{engine} {policy}", policy=policy, **_own_pool(engine), **sizes)
                for policy in policies_of(engine, "shared")
            ]
            compared += [
                Arm(name=f"{engine} {pool} pool", engine=engine, pool=pool, **sizes)
                for pool in ("native", "int8")
            ]
            arms += _against_first(compared)
        workload = Workload(kind="agent", sessions=24, turns=20)
        return Cell(name=f"{blocks} blocks", workload=workload, arms=arms, at=blocks)

    def _side_by_side(self, blocks: int) -> Cell:
        """All engines, each alone and at its best, on one workload and as many bytes."""
        sizes = _tenth_for_states(blocks)
        arms = []
        for engine in self._engines:
            own = _own_pool(engine)
            best = _BEST_SHARED if own["pool"] == "shared" else policies.DEFAULT
            arms += [
                Arm(name=f"{engine} alone", policy="stock", **own, **sizes),
                Arm(name=f"{engine} {best}", policy=best, **own, **sizes),
                Arm(name=f"{engine} int8", engine=engine, pool="int8", **sizes),
                *_tuned(engine, sizes),
            ]
        workload = Workload(kind="agent", sessions=24, turns=20)
        return Cell(name=f"{blocks} blocks", workload=workload, arms=arms, at=blocks)

    def _tuned(self, slots: int) -> Cell:
        """The engines alone, as their users tune them, and each policy of the plugin."""
        sizes: dict[str, Any] = {"slots": slots, "kv_tokens": _AMPLE_KV_TOKENS}
        arms = []
        for engine in self._engines:
            alone = Arm(name=f"{engine} alone", engine=engine, policy="stock", **sizes)
            arms += _against_first(
                [
                    alone,
                    *_tuned(engine, sizes),
                    *_policies(engine, sizes),
                    *_policies(engine, sizes, pool="int8"),
                ]
            )
        workload = Workload(kind="agent", sessions=64, turns=40)
        return Cell(name=f"agents, {slots} slots", workload=workload, arms=arms, at=slots)

    def _on_trace(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return the cells with the beginning of the trace as their workload."""
        if self._trace is None:
            return []
        workload = Workload(kind="trace", file=self._trace, limit=1_500)
        return [
            msgspec.structs.replace(cell, name=f"trace, {cell.at:g} slots", workload=workload)
            for cell in cells
        ]


def _runs_on(engine: str, kind: _Kind) -> bool:
    if engine == REPLAY:
        return not (kind.compares or kind.tuned)
    if kind.tuned and not engine_specs()[engine].tuned:
        return False
    return kind.pools <= _pools(engine) and not kind.without & _pools(engine)


def _policies(
    engine: str, sizes: Mapping[str, Any], pool: str = "native", place: str = policies.ENGINE
) -> list[Arm]:
    """Return an arm for each policy that there is in `place`."""
    more = "" if pool == "native" else f" {pool}"
    return [
        Arm(name=f"{engine} {policy}{more}", engine=engine, policy=policy, pool=pool, **sizes)
        for policy in policies.policy_names(place)
    ]


def _tuned(engine: str, sizes: Mapping[str, Any]) -> list[Arm]:
    """Return the arms of an engine alone as its users tune it."""
    tuned = {} if engine == REPLAY else engine_specs()[engine].tuned
    return [
        Arm(name=f"{engine} alone, {title}", engine=engine, policy="stock", **keys, **sizes)
        for title, keys in tuned.items()
    ]


def _pools(engine: str) -> set[str]:
    return {pool for pool in POOLS if policies_of(engine, pool)}


def _own_pool(engine: str) -> dict[str, Any]:
    """Return where an engine keeps states by itself."""
    if "shared" not in _pools(engine):
        return {"engine": engine, "pool": "native"}
    return {"engine": engine, "pool": "shared", "admission": "branch-points"}


def _tenth_for_states(blocks: int) -> dict[str, Any]:
    """Return sizes of a memory of so many blocks; a state takes three."""
    slots = blocks // 30
    return {"slots": slots, "kv_tokens": (blocks - 3 * slots) * BLOCK_TOKENS}


def _against_first(arms: Sequence[Arm]) -> list[Arm]:
    return [msgspec.structs.replace(arm, baseline=arms[0].name) for arm in arms]
