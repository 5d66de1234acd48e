"""vLLM's worker with two additions: memory for checkpoints, and restores before anything else.

`--worker-cls` is vLLM's own way to choose a worker. In vLLM 0.32 nothing else runs early enough in
both model runners: in V2 the connector is called after blocks were zeroed and copied.
"""

from __future__ import annotations

import functools
from typing import Any

from statecache.engine.settings import Settings
from statecache_vllm import seams
from statecache_vllm.checkpoint_memory import set_aside

_NAMES = {"CpuCheckpointWorker": True, "CheckpointWorker": False}


@functools.cache
def _worker(name: str) -> Any:
    base = seams.worker_base(cpu=_NAMES[name])

    def determine_available_memory(self: Any) -> int:
        available = int(base.determine_available_memory(self))
        transfer = self.vllm_config.kv_transfer_config
        settings = Settings.from_given(transfer.kv_connector_extra_config["statecache"], {})
        specs = self.model_runner.get_kv_cache_spec().values()
        return set_aside(settings, specs, available)

    def execute_model(self: Any, scheduler_output: Any) -> Any:
        commands = scheduler_output.kv_connector_metadata
        if commands is not None:
            seams.transfer_group().restore(commands)
        return base.execute_model(self, scheduler_output)

    members = {
        "__doc__": f"vLLM's {base.__name__} with a checkpoint pool.",
        "__module__": __name__,
        "determine_available_memory": determine_available_memory,
        "execute_model": execute_model,
    }
    return type(name, (base,), members)


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return _worker(name)
