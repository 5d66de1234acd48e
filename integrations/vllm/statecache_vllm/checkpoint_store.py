"""The checkpoint pool of one worker, laid over the tensors vLLM keeps its states in.

A state of vLLM 0.32 is one block in each group of recurrent layers, and the groups lie over each
other: layer `i` of every group may be the same tensor. Groups that share their tensors share a
pool, in which a state takes one slot a group, so that one launch a tensor kind moves them all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from statecache.engine.settings import Settings
from statecache.errors import escape_control_chars, exit_engine
from statecache_vllm import seams
from statecache_vllm.checkpoint_memory import describe, pool_slots, slots_flag

__all__ = ["CheckpointStore"]

Copy = tuple[int, int, tuple[int, ...]]


@dataclasses.dataclass
class _Pool:
    active: Any
    pool: Any
    groups: list[int]  # positions among the recurrent groups


class CheckpointStore:
    """Copies states between vLLM's blocks and slots. The scheduler decides which is where."""

    def __init__(self, settings: Settings, vllm_config: Any, kv_cache_config: Any) -> None:
        slots = pool_slots(settings, vllm_config, kv_cache_config)
        self._int8 = settings.checkpoint_mode == "int8"
        states, _, _ = seams.groups_of(kv_cache_config)
        groups = [kv_cache_config.kv_cache_groups[group] for group in states]
        found: dict[tuple[int, ...], tuple[Any, list[int]]] = {}
        library = import_module("statecache.checkpoint.pool")
        for position, group in enumerate(groups):
            layers = [describe(one) for one in seams.state_tensors(vllm_config, group.layer_names)]
            where = tuple(temporal.data_ptr() for temporal, _ in layers)
            if where not in found:
                convolutions = [conv for _, several in layers for conv in several]
                active = library.ActiveState([temporal for temporal, _ in layers], convolutions)
                found[where] = (active, [])
            found[where][1].append(position)
        self._pools = []
        for active, positions in found.values():
            total = slots * len(positions)
            try:
                pool = library.CheckpointPool(active, total, mode=settings.checkpoint_mode)
            except (MemoryError, RuntimeError, library.PoolDoesNotFitError) as error:
                what = f"{slots} {settings.checkpoint_mode} checkpoints"
                why = escape_control_chars(str(error))
                exit_engine(f"no memory for {what}: {why}: lower {slots_flag(settings)}")
            pool.alloc(total)
            self._pools.append(_Pool(active, pool, positions))
        self._stored: tuple[int, ...] | None = None
        self._reports: list[tuple[_Pool, Any, dict[int, int]]] = []

    def restore(self, copies: Sequence[Copy]) -> None:
        """Bring states back into blocks, one launch a tensor kind."""
        for one in self._pools:
            blocks, slots, _ = self._places(one, copies)
            one.pool.load(slots, one.active, blocks)

    def store(self, copies: Sequence[Copy]) -> None:
        """Keep states, one launch a tensor kind."""
        self._stored = tuple(state for state, _, _ in copies)
        for one in self._pools:
            blocks, slots, states = self._places(one, copies)
            report = one.pool.store(one.active, blocks, slots)
            if self._int8:
                self._reports.append((one, report, dict(zip(slots, states, strict=True))))

    def report(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return the states of the last store and which of them hold NaN or Inf, once.

        In int8 this waits for the device; exact copies are never refused.
        """
        if self._stored is None:
            return None
        stored, self._stored = self._stored, None
        refused: dict[int, None] = {}
        for one, report, states in self._reports:
            slots = report.refused()
            refused.update(dict.fromkeys(states[slot] for slot in slots))
            one.pool.alloc(len(slots))  # every slot stays allocated: the scheduler rules them
        self._reports.clear()
        return stored, tuple(refused)

    def _places(self, one: _Pool, copies: Sequence[Copy]) -> tuple[list[int], list[int], list[int]]:
        width = len(one.groups)
        blocks = [ids[group] for _, _, ids in copies for group in one.groups]
        slots = [slot * width + at for _, slot, _ in copies for at in range(width)]
        states = [state for state, _, _ in copies for _ in range(width)]
        return blocks, slots, states
