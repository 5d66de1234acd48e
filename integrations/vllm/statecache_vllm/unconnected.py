"""The scheduler's half in a vLLM without a KV connector: a block policy alone needs none.

Where one is configured vLLM does less by itself: 0.33 hashes no look-ahead tokens then, so that a
hit under a drafter ends up to a block earlier. Without a checkpoint pool nothing is copied, and no
worker takes part. The settings travel in `additional_config`, as `CarriedSettings`; in each process
they come to, a scheduler gets our half after it has made all its own without a connector, and
vLLM's metrics get what is counted there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from statecache.engine.patching import PatchSet
from statecache_vllm import patches, seams
from statecache_vllm.unsupported import not_supported

if TYPE_CHECKING:
    from statecache_vllm.views import KVCacheConfig, Scheduler, VllmConfig

__all__ = ["CarriedSettings", "carry", "settings_of"]

_KEY = "statecache"


class CarriedSettings(dict[str, object]):
    """Settings by name: `given`. A process that they are sent to has the patches in place by then.

    As a dictionary it is empty: vLLM keeps what it compiled by what `additional_config` holds, and
    no setting changes that.
    """

    def __init__(self, given: dict[str, object]) -> None:
        super().__init__()
        self.given = given

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        """Return what makes them anew where they arrive."""
        return _arrived, (self.given,)


def _arrived(given: dict[str, object]) -> CarriedSettings:
    _PATCHES.install()
    return CarriedSettings(given)


def carry(config: VllmConfig, given: dict[str, object]) -> None:
    """Have `config` bring the settings to every process. Raises `SettingsError`."""
    own = config.additional_config
    if not isinstance(own, dict):
        raise not_supported("an additional_config that is no dictionary")
    _PATCHES.install()
    config.additional_config = {**own, _KEY: CarriedSettings(given)}


def settings_of(config: VllmConfig) -> dict[str, object] | None:
    """Return the settings that a configuration without a connector carries, None without us."""
    own = config.additional_config
    given = own.get(_KEY) if isinstance(own, dict) else None
    return given.given if isinstance(given, CarriedSettings) else None


def _connected(config: VllmConfig) -> VllmConfig | None:
    """Return `config` as it were with the connector in it, None where it carries no settings."""
    given = settings_of(config)
    if given is None:
        return None
    connected = copy.copy(config)
    connected.kv_transfer_config = seams.connect(dict(given))
    return connected


def _begin_scheduler(
    original: Callable[..., None],
    scheduler: Scheduler,
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    *args: object,
    **kwargs: object,
) -> None:
    """Around `Scheduler.__init__`: our half takes the place of a connector once all is made."""
    connected = _connected(vllm_config)
    if connected is None:
        original(scheduler, vllm_config, kv_cache_config, *args, **kwargs)
        return
    from statecache_vllm.connector import UnconnectedScheduler

    ours = UnconnectedScheduler(connected, seams.scheduler_role(), kv_cache_config)
    original(scheduler, vllm_config, kv_cache_config, *args, **kwargs)
    scheduler.connector = ours
    reset = patches.RESET_CONNECTOR_CACHE.on(scheduler).replaced_by(ours.reset_cache)
    PatchSet([reset]).install()
    ours.bind_kv_cache_manager(scheduler.kv_cache_manager)


def _begin_metrics(
    original: Callable[..., None], metrics: object, vllm_config: VllmConfig, *args: object
) -> None:
    """Around `KVConnectorProm.__init__`: as if the connector were configured."""
    original(metrics, _connected(vllm_config) or vllm_config, *args)


def _log_nothing(
    original: Callable[..., None], log: object, transfer_stats_data: dict[str, Any]
) -> None:
    """Around `KVConnectorLogging.observe`, which wants the class of a connector."""
    if getattr(log, "connector_cls", None) is not None:
        original(log, transfer_stats_data)


_PATCHES = PatchSet(
    [
        patches.BEGIN_SCHEDULER.wrapped_by(_begin_scheduler),
        patches.BEGIN_METRICS.wrapped_by(_begin_metrics),
        patches.LOG_CONNECTOR.wrapped_by(_log_nothing),
    ]
)
