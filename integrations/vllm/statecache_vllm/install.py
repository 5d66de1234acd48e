"""Configures vLLM for the plugin, all of it or nothing, and says so."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable

from statecache.engine import seams as seam
from statecache.engine.cost import cost_text
from statecache.engine.settings import Settings
from statecache.errors import SettingsError
from statecache.trace.record_file import check_record_file
from statecache_vllm import seam_table, seams, unconnected, unsupported
from statecache_vllm.checkpoint_memory import check_slots, with_host_size
from statecache_vllm.prefill_chunks import check_interval
from statecache_vllm.views import EngineArgs, VllmConfig

_log = logging.getLogger("statecache.vllm")


def configure(
    settings: Settings, engine_args: EngineArgs, create: Callable[[], VllmConfig]
) -> VllmConfig:
    """Probe every seam, have vLLM make its configuration, put in what is needed, and check it.

    Raises `SeamError` or `SettingsError` with nothing installed. A model without recurrent states
    gets vLLM's own configuration.
    """
    seams.share_log()
    seam.check_native("statecache._index", "statecache._blocks")
    check_seams(settings)
    if settings.record is not None and multiprocessing.parent_process() is None:
        check_record_file(settings.record)  # in a child it may be that of this very server
    in_force = settings.in_force
    asked = "policy" in settings.given and not settings.dry_run
    if asked and not settings.checkpoints:
        raise SettingsError(
            f"--statecache-policy {settings.policy} needs --statecache-checkpoints: it rules the"
            " slots of that pool (the blocks have --statecache-block-policy)"
        )
    pool = in_force.checkpoints is not None
    unsupported.refuse(engine_args, pool=pool)
    if engine_args.block_size is not None:
        # The block can only become a multiple of this one, in processes that start later.
        check_interval(in_force, engine_args.block_size)
    settings = with_host_size(settings, engine_args.tensor_parallel_size)
    config = _with_connector(settings, engine_args, create) if pool else create()
    if not config.model_config.is_hybrid:
        _log.warning("statecache: this model caches no recurrent states; nothing was changed")
        return create() if pool else config
    unsupported.refuse_config(config)
    check_slots(in_force, config)
    _check(config)
    if not pool:
        unconnected.carry(config, _given(settings))
    _log.info(
        "statecache: block policy %s, checkpoints %s, policy %s, vLLM %s",
        in_force.block_policy,
        f"{in_force.checkpoints or 'none'}{' in host memory' if in_force.on_host else ''}",
        settings.policy,
        seams.engine_version(),
    )
    return config


def _with_connector(
    settings: Settings, engine_args: EngineArgs, create: Callable[[], VllmConfig]
) -> VllmConfig:
    """Return vLLM's configuration with the connector and the worker of a checkpoint pool."""
    worker_class = engine_args.worker_cls
    engine_args.kv_transfer_config = seams.connect(_given(settings))
    engine_args.worker_cls = seams.worker_class()
    try:
        return create()
    finally:
        engine_args.worker_cls = worker_class
        engine_args.kv_transfer_config = None


def _given(settings: Settings) -> dict[str, object]:
    """Return the settings as they travel to every process."""
    given = {name: getattr(settings, name) for name in settings.given}
    if "cost" in given:
        given["cost"] = cost_text(settings.cost_model())
    return given


def check_seams(settings: Settings) -> None:
    """Raise `SeamError` unless every seam is as it was in the tested versions."""
    version = seams.engine_version()
    seam.check(
        "vLLM",
        version,
        seam_table.SEAMS,
        seam_table.TESTED,
        package="vllm",
        strict=settings.strict,
        log=_log,
        views=seam_table.VIEWS,
    )


def _check(config: VllmConfig) -> None:
    mode = config.cache_config.mamba_cache_mode
    if not config.cache_config.enable_prefix_caching or mode != "align":
        raise unsupported.not_supported(f"prefix caching of states in mode '{mode}'")
