"""Restores that prove themselves: a worker compares, and the scheduler takes back what is wrong.

A worker looks at what a slot says of its state before it restores it, and reports with the output
of the same step. By then the request has been computed from a state that is not its own, and the
blocks it filled may have served others. So before any output of that step is handed on, every
running request is preempted, its output dropped, and the cache emptied, states and KV alike: all
by `Scheduler.reset_prefix_cache`. The requests are computed again from their tokens. vLLM 0.32 has
no narrower way: it knows no block-level load error for a model with several groups of layers
(`Scheduler._handle_invalid_blocks`).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from statecache.engine.metric_table import MetricKey
from statecache.engine.metrics import EventCounters
from statecache.engine.patching import PatchSet
from statecache.engine.verification import note_errors
from statecache_vllm.patches import UPDATE_FROM_OUTPUT

if TYPE_CHECKING:
    from statecache.engine.faults import FaultBarrier
    from statecache_vllm.views import ModelRunnerOutput, Scheduler, SchedulerOutput

__all__ = ["ProofKeeper", "StepProof", "Unproved", "install"]

_log = logging.getLogger("statecache.vllm")


class Unproved(NamedTuple):
    """A restore that was not what its slot should hold: the state, and what of it did not fit."""

    state: int
    what: str


@dataclasses.dataclass(frozen=True)
class StepProof:
    """What the checks of one step found, on one worker or on all of them.

    `stores` and `restores` are how many states were added up and compared; `errors` the relative
    errors of the int8 states of that share, by kind of layer; `launch_failures` kernels could not
    be launched, and plain torch operators copied. It travels from process to process.
    """

    unproved: tuple[Unproved, ...] = ()
    stores: int = 0
    restores: int = 0
    errors: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)
    launch_failures: int = 0

    def merged(self, other: StepProof) -> StepProof:
        """Return both as one; workers look at the same states, each at its own shard."""
        errors = {
            kind: [*self.errors.get(kind, ()), *other.errors.get(kind, ())]
            for kind in {**self.errors, **other.errors}
        }
        return StepProof(
            tuple(dict.fromkeys((*self.unproved, *other.unproved))),
            max(self.stores, other.stores),
            max(self.restores, other.restores),
            errors,
            self.launch_failures + other.launch_failures,
        )


class ProofKeeper:
    """The scheduler's half: counts what workers found, and takes wrong answers back."""

    def __init__(self, faults: FaultBarrier) -> None:
        self.events = EventCounters()
        self._faults = faults

    def note(self, proof: StepProof) -> None:
        """Count what was looked at in a step."""
        if proof.stores:
            self.events.add(MetricKey.VERIFIED_STORES.value, proof.stores)
        if proof.restores:
            self.events.add(MetricKey.VERIFIED_RESTORES.value, proof.restores)
        note_errors(self.events, proof.errors, _log)
        for _ in range(proof.launch_failures):
            self._faults.count(
                "a worker's copies of checkpoints go on by plain torch operators: its log says why",
                takes_over=False,
            )

    def take_back(self, scheduler: Scheduler, unproved: tuple[Unproved, ...]) -> None:
        """Drop all that was computed from a state that was wrong, before it is handed on."""
        for state, what in unproved:
            self.events.add(MetricKey.RESTORE_MISMATCHES.of(what))
            self._faults.count(
                f"checkpoint {state} is not what was to be restored ({what}): all running requests"
                " are computed again, and the cache is empty",
                takes_over=False,
            )
        scheduler.reset_prefix_cache(reset_running_requests=True)


def _look_at_output(
    original: Callable[..., object],
    scheduler: Scheduler,
    scheduler_output: SchedulerOutput,
    model_runner_output: ModelRunnerOutput,
) -> object:
    """Around `Scheduler.update_from_output`, of every scheduler in this process."""
    ours = getattr(getattr(scheduler, "connector", None), "scheduler_side", None)
    if ours is not None:
        ours.report.stepped(scheduler_output, model_runner_output)
    found = model_runner_output.kv_connector_output
    if ours is not None and found is not None:
        proof = getattr(found.kv_connector_worker_meta, "proof", None)
        if isinstance(proof, StepProof) and proof.unproved:
            ours.proofs.take_back(scheduler, proof.unproved)
    return original(scheduler, scheduler_output, model_runner_output)


_PATCHES = PatchSet([UPDATE_FROM_OUTPUT.wrapped_by(_look_at_output)])


def install() -> None:
    """Look at the output of each step; stays for the process: schedulers without us pass it."""
    _PATCHES.install()
