"""What the metrics say of a scheduler, and how that gets to vLLM's `/metrics`.

vLLM 0.32 serves `/metrics` in the API process. What the scheduler's connector returns from
`get_kv_connector_stats` travels there with the outputs of a step: what has changed since the last
time, so that several API processes may share the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from statecache.engine.metrics import (
    DRY_RUN,
    Changes,
    Counts,
    Exporter,
    PrometheusClasses,
    Quiet,
    Reporter,
    merged,
)
from statecache.engine.patching import bind_dynamically
from statecache.engine.settings import Settings
from statecache_vllm import seams
from statecache_vllm.checkpoint_memory import bytes_per_state

if TYPE_CHECKING:
    from statecache_vllm.scheduler_side import Planner

__all__ = ["Report", "StateMetrics", "StateStats", "policy_label"]

_BASES = seams.stats_bases()
_Stats: Any = _BASES[0]
_PromMetrics: Any = _BASES[1]


def policy_label(settings: Settings) -> str:
    """Return the order of the blocks and, with a pool, the policy of its slots."""
    if settings.dry_run:
        return DRY_RUN
    pool = "" if settings.checkpoint_mode is None else f"+{settings.policy}"
    return f"{settings.block_order}{pool}"


class Report:
    """Counts requests and reads the numbers of a planner at intervals."""

    def __init__(self, settings: Settings, planner: Planner, kv_cache_config: Any) -> None:
        self._settings, self._planner = settings, planner
        mode = settings.checkpoint_mode
        self._bytes = 0 if mode is None else bytes_per_state(mode, kv_cache_config)
        self._counts = Counts()
        self._found: dict[str, tuple[int, int]] = {}
        self._books: dict[str, float] = {}
        self._changes = Changes()
        self._pending: dict[str, float] = {}
        self._reporter = Reporter(self._sample, lambda: self._take)
        self.admitted = Quiet(self._admitted)
        """Called with a request that is going to be prefilled from what was last found for it."""
        self.also: Callable[[], dict[str, float]] = dict
        """What else is to be shown."""
        self._pool: Any = None
        self._is_last = False

    def watch(self, manager: Any) -> None:
        """See every lookup of a `KVCacheManager`, as the last one around it."""
        self._pool = manager.block_pool
        look_up, note = bind_dynamically(manager, "get_computed_blocks"), Quiet(self._note)

        def get_computed_blocks(request: Any) -> Any:
            found = look_up(request)
            note(request, found)
            return found

        manager.get_computed_blocks = get_computed_blocks

    def _note(self, request: Any, found: Any) -> None:
        _, hit, resident = found
        self._found[request.request_id] = (hit, resident)

    def hit_of(self, request: Any) -> int:
        """Return the tokens that were last found for a request that is going to be admitted."""
        return self._found.get(request.request_id, (0, 0))[0]

    def _admitted(self, request: Any) -> None:
        hit, resident = self._found.pop(request.request_id, (0, 0))
        self._counts.admitted(request.num_tokens, hit, resident)

    def finished(self, name: str, *, last: bool) -> None:
        """A request ended, admitted or not; after the last one there may be no step for long."""
        self._found.pop(name, None)
        self._is_last = last

    def changes(self) -> dict[str, float]:
        """Return what has changed: about once a second, and after the last request."""
        self._reporter.report(now=self._is_last)
        self._is_last = False
        found, self._pending = self._pending, {}
        return found

    def _take(self, changes: Mapping[str, float]) -> None:
        self._pending = merged(self._pending, changes)

    def _sample(self) -> dict[str, float]:
        planner, settings, pool = self._planner, self._settings, self._pool
        ordered = settings.block_order != "stock"
        active = (ordered or bool(settings.checkpoint_mode)) and not (
            (ordered and planner.queue is None)
            or (settings.checkpoint_mode and planner.book is None)
        )
        if planner.book is not None:
            self._books = self._of_book(planner.book)
        return {
            **self._counts.sample(),
            **self._books,
            **self.also(),
            f"active|{policy_label(settings)}": float(active),
            "anomalies": planner.guard.anomalies,
            "slots|blocks": pool.num_gpu_blocks - 1,  # the null block is never handed out
            "slots_free|blocks": pool.get_num_free_blocks(),
        }

    def _of_book(self, book: Any) -> dict[str, float]:
        """Return the numbers of the checkpoint pool; the counts outlive a book that failed."""
        mode, counts = self._settings.checkpoint_mode, book.counts
        return {
            **book.events.sample(),
            **book.tree.sample(),
            "slots|checkpoint": book.slots,
            "slots_free|checkpoint": book.slots - len(book),
            "states_resident|checkpoint": len(book),
            "states_pinned|checkpoint": book.pinned,
            f"checkpoint_stores|{mode}": counts.stored,
            f"checkpoint_restores|{mode}": counts.restored,
            f"checkpoint_stored_bytes|{mode}": counts.stored * self._bytes,
            f"checkpoint_restored_bytes|{mode}": counts.restored * self._bytes,
        }


class StateStats(_Stats):  # type: ignore[misc]
    """Changes on their way to the API process."""

    def aggregate(self, other: Any) -> StateStats:
        """Return both as one."""
        return StateStats(merged(self.data, other.data))

    def is_empty(self) -> bool:
        """Whether nothing has changed."""
        return not self.data

    def reset(self) -> None:
        """Forget them."""
        self.data.clear()

    def reduce(self) -> dict[str, int | float]:
        """Return them as they are."""
        return dict(self.data)


class StateMetrics(_PromMetrics):  # type: ignore[misc]
    """The metrics in the API process."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        given = vllm_config.kv_transfer_config.kv_connector_extra_config["statecache"]
        label = policy_label(Settings.from_given(given, {}))
        classes = PrometheusClasses(self._counter_cls, self._gauge_cls, self._histogram_cls)
        model = labelnames.index("model_name")
        self._sinks: dict[int, Callable[[dict[str, float]], None]] = {}
        for rank, values in per_engine_labelvalues.items():
            exporter = Exporter(classes, "vllm", str(values[model]), rank)
            # Its scheduler has the connector in place before there are metrics.
            exporter.apply({f"active|{label}": float(label not in ("stock", DRY_RUN))})
            self._sinks[rank] = Quiet(exporter.apply)

    def observe(self, transfer_stats_data: dict[str, float], engine_idx: int = 0) -> None:
        """Add what has changed in one scheduler."""
        self._sinks[engine_idx](transfer_stats_data)
