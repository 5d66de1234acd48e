"""Ready-made tests, each with its arms, workload and sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from statecache.ab.arms import Arm, policies_of
from statecache.ab.statistics import default_repeats
from statecache.ab.trial import Cell
from statecache.ab.workloads import Workload
from statecache.errors import SettingsError, escape_control_chars
from statecache.index.policies import BASELINE, DEFAULT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["EXPERIMENTS", "Experiment"]

# What each may be run on, the axis of its plot, and the part of the requests that is warm-up.
EXPERIMENTS = {
    "sessions": (("core", "sglang", "vllm"), "agent sessions at once", 0.1),
    "distinct-prefixes": (("core", "sglang", "vllm"), "distinct prefixes", 0.2),  # the first round
    "agent-traces": (("core", "sglang"), "state slots", 0.0),
    "one-pool": (("core", "vllm"), "blocks of the pool", 0.1),
    "engines": (("sglang", "vllm"), "blocks of 512 tokens of memory in all", 0.1),
}
_NOTES = {
    "sessions": [
        "419 state slots and 2,969,600 tokens of KV; each session runs one request at all times,"
        " which keeps 5 slots. In vLLM the slots are those of a checkpoint pool."
    ],
    "distinct-prefixes": [
        "256 slots of native states, or 512 of int8 ones in the same bytes. All states cost the"
        " same, so no policy can gain here. KV holds one round of 768 prefixes: with"
        " more of it vLLM would keep the states among the blocks and find them there too."
    ],
    "engines": [
        "The same bytes for all arms: a state takes as many as three blocks. By design SGLang keeps"
        " states in slots of their own, a tenth of the memory here, sets one every 8,192 tokens and"
        " at each prompt's end, and drops the KV of a leaf with its state. vLLM alone keeps states"
        " and KV in one pool, and sets states at prompt ends and where known prefixes end; its"
        " checkpoint pool comes out of the same bytes."
    ],
}
_SESSIONS = (16, 24, 32, 40, 64)
_PREFIXES = (128, 256, 384, 512, 640, 768)
_TRACE_SLOTS = (32, 64, 128, 256, 384, 1024)
_POOL_BLOCKS = (1024, 2048, 3072)
_KV_TOKENS = 2_969_600
_ROUND_KV_TOKENS = 768 * 3 * 512  # a round of the most prefixes, each with an end of its own
_AMPLE_KV_TOKENS = 512 * 2**20


class Experiment:
    """An experiment by name, on some of its engines."""

    def __init__(self, name: str, engines: str | None = None, trace: str | None = None) -> None:
        """Check what was asked for. Raises `SettingsError`."""
        if name not in EXPERIMENTS:
            known = ", ".join(EXPERIMENTS)
            raise SettingsError(
                escape_control_chars(f"--experiment: unknown {name!r}: use {known}")
            )
        known_engines, self.axis, self.warm_up = EXPERIMENTS[name]
        self.notes = _NOTES.get(name, [])
        self.name = name
        self._trace = trace
        compares = name == "engines"  # arms of all its engines, with one another
        if engines is None:
            engines = ",".join(known_engines) if compares else known_engines[0]
        self._engines = list(dict.fromkeys(part.strip() for part in engines.split(",")))
        for engine in self._engines:
            if engine not in known_engines:
                raise SettingsError(
                    escape_control_chars(
                        f"--engines: {name} does not run on {engine!r}:"
                        f" use {', '.join(known_engines)}"
                    )
                )
        if compares and set(self._engines) != set(known_engines):
            both = " and ".join(known_engines)
            raise SettingsError(f"--engines: {name} compares {both}: leave it out")
        if name == "agent-traces" and trace is None:
            raise SettingsError(f"--experiment: {name} plays a recorded trace: give --trace FILE")
        if name != "agent-traces" and trace is not None:
            raise SettingsError(f"--trace: {name} makes its own workload: leave it out")

    @property
    def repeats(self) -> int:
        """How many seeds are run unless said otherwise: as many as on all its engines.

        So a part of the engines gives the same numbers as all of them.
        """
        known_engines = ",".join(EXPERIMENTS[self.name][0])
        everywhere = Experiment(self.name, known_engines, self._trace).cells()
        pairs = sum(len(cell.pairs) for cell in everywhere if cell.seeded)
        return default_repeats(pairs) if pairs else 1

    def cells(self) -> list[Cell]:
        """Return the cells, in the order of the axis."""
        made: dict[str, tuple[Callable[[int], Cell], Sequence[int]]] = {
            "sessions": (self._sessions, _SESSIONS),
            "distinct-prefixes": (self._prefixes, _PREFIXES),
            "agent-traces": (self._agent_traces, _TRACE_SLOTS),
            "one-pool": (self._one_pool, _POOL_BLOCKS),
            "engines": (self._side_by_side, _POOL_BLOCKS),
        }
        cell, sizes = made[self.name]
        return [cell(size) for size in sizes]

    def _sessions(self, sessions: int) -> Cell:
        """Lru against gds where `sessions` requests run at all times and keep 5 slots each."""
        arms = []
        for engine in self._engines:
            sizes: dict[str, Any] = {"slots": 419, "kv_tokens": _KV_TOKENS, "running": sessions}
            arms += _against_first(
                [
                    Arm(name=f"{engine} {policy}", engine=engine, policy=policy, **sizes)
                    for policy in (BASELINE, DEFAULT)
                ]
            )
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
                    policy=BASELINE,
                    pool=pool,
                    slots=256,
                    int8_ratio=2,
                    kv_tokens=_ROUND_KV_TOKENS,
                    admission="dense" if engine == "vllm" else "aligned",
                    chunk=1024,
                )
                pair.append(arm)
            arms += _against_first(pair)
        workload = Workload(kind="distinct-prefixes", count=count, rounds=5)
        return Cell(name=f"{count} prefixes", workload=workload, arms=arms, at=count)

    def _agent_traces(self, slots: int) -> Cell:
        arms = []
        for engine in self._engines:
            policies = policies_of("core", "native") if engine == "core" else (BASELINE, DEFAULT)
            arms += _against_first(
                [
                    Arm(
                        name=f"{engine} {policy}",
                        engine=engine,
                        policy=policy,
                        slots=slots,
                        kv_tokens=0 if engine == "core" else _AMPLE_KV_TOKENS,
                    )
                    for policy in policies
                ]
            )
        workload = Workload(kind="trace", file=self._trace)
        return Cell(name=f"{slots} slots", workload=workload, arms=arms, at=slots)

    def _one_pool(self, blocks: int) -> Cell:
        """One pool of blocks of 512 tokens, a tenth of it for states, at equal bytes."""
        slots = blocks // 30
        sizes: dict[str, Any] = {"slots": slots, "kv_tokens": (blocks - 3 * slots) * 512}
        arms = []
        for engine in self._engines:
            shared = ("stock", "copies", "reuse") if engine == "core" else ("stock", "reuse", "gds")
            made = [
                Arm(
                    name=f"{engine} {policy}",
                    engine=engine,
                    policy=policy,
                    pool="shared",
                    admission="junctions",
                    **sizes,
                )
                for policy in shared
            ]
            made += [
                Arm(name=f"{engine} {pool} pool", engine=engine, pool=pool, **sizes)
                for pool in ("native", "int8")
            ]
            arms += _against_first(made)
        workload = Workload(kind="agent", sessions=24, turns=20)
        return Cell(name=f"{blocks} blocks", workload=workload, arms=arms, at=blocks)

    def _side_by_side(self, blocks: int) -> Cell:
        """Both engines, each alone and at its best, on one workload and as many bytes."""
        slots = blocks // 30
        sizes: dict[str, Any] = {"slots": slots, "kv_tokens": (blocks - 3 * slots) * 512}
        own: dict[str, Any] = {"pool": "shared", "admission": "junctions"}
        arms = [
            Arm(name="sglang alone", engine="sglang", policy="stock", **sizes),
            Arm(name="sglang gds", engine="sglang", **sizes),
            Arm(name="sglang int8", engine="sglang", pool="int8", **sizes),
            Arm(name="vllm alone", engine="vllm", policy="stock", **own, **sizes),
            Arm(name="vllm reuse", engine="vllm", policy="reuse", **own, **sizes),
            Arm(name="vllm int8", engine="vllm", pool="int8", **sizes),
        ]
        workload = Workload(kind="agent", sessions=24, turns=20)
        return Cell(name=f"{blocks} blocks", workload=workload, arms=arms, at=blocks)


def _against_first(arms: Sequence[Arm]) -> list[Arm]:
    return [msgspec.structs.replace(arm, baseline=arms[0].name) for arm in arms]
