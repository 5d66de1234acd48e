"""What may go wrong around the plugin: vLLM goes on, or start-up stops with one clear line.

What fails inside the plugin (queue, map, checkpoints, a store) is in test_guard.py, a seam that
moved and a version that nobody tried in test_seams.py, other plugins in test_other_plugins.py, real
servers in test_server_faults.py.
"""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from stored import store_over

import statecache
from statecache.checkpoint.pool import CheckpointPool
from statecache.engine.settings import Settings
from statecache_vllm.connector import StateCacheConnector, StepCommands, Stored
from statecache_vllm.worker_side import WorkerSide

CONFIGURE = """
    import sys
    from vllm.plugins import load_general_plugins
    load_general_plugins()
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    args = AsyncEngineArgs.from_cli_args(parser.parse_args(sys.argv[1:]))
    args.create_engine_config()
    print("configured")
"""


def in_a_fresh_process(code: str, *arguments: str, path: object = "") -> CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONPATH": str(path)},
    )


def broken_copy(folder: Path, broken: str, content: bytes | None) -> Path:
    """A copy of the package with an extension of this content, None for another Python's."""
    copy, ignored = folder / "statecache", shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(statecache.__file__).parent, copy, ignore=ignored)
    (found,) = copy.glob(f"{broken}.*.so")
    if content is None:
        found.rename(found.with_name(re.sub(r"cpython-\d+", "cpython-399", found.name)))
    else:
        found.write_bytes(content)
    return folder


@pytest.mark.parametrize(
    ("module", "content", "why"),
    [
        ("_index", None, "No module named 'statecache._index'"),
        ("_blocks", b"no library" * 1000, "{path}: invalid ELF header"),
    ],
)
def test_an_extension_that_does_not_load_stops_a_server_that_asks_for_it_alone(
    model, tmp_path, module, content, why
):
    code = textwrap.dedent(CONFIGURE)
    words = ["--model", str(model), "--block-size", "32"]
    path = broken_copy(tmp_path, module, content)
    (library,) = (path / "statecache").glob(f"{module}.*.so")
    asked = in_a_fresh_process(code, *words, "--kv-cache-plugin", "statecache", path=path)
    assert asked.returncode == 2
    assert asked.stderr.splitlines()[-1] == (
        f"statecache: statecache.{module} does not load: reinstall statecache with pip in this"
        f" Python ({why.format(path=library)})"
    )
    assert "Traceback" not in asked.stderr
    alone = in_a_fresh_process(code, *words, path=path)
    assert alone.stdout.splitlines()[-1] == "configured", alone.stderr


def test_an_int8_store_that_fails_is_reported_once_and_ends_the_stores(monkeypatch, caplog):
    """In the worker: the pool of the copies raises; the scheduler hears of it and stores no more.

    What becomes of the requests then is in test_guard.py, on a real engine.
    """
    store, _ = store_over(monkeypatch, shared=False, checkpoints="int8", checkpoint_slots=4)
    worker = StateCacheConnector.__new__(StateCacheConnector)
    worker._worker_side = side = WorkerSide(
        Settings.from_given({"kv_cache_plugin": "statecache"}, {}), None, None
    )
    side.store = store
    worker._connector_metadata = StepCommands([], [(10, 3, (1, 2, 3))])
    monkeypatch.setattr(CheckpointPool, "store", lambda *_: 1 / 0)
    for _ in range(3):
        worker.wait_for_save()
        assert worker.build_connector_worker_meta() == Stored(failed=True)
    assert side.faults.anomalies == 1
    assert len({id(r) for r in caplog.records if r.levelname == "ERROR"}) == 1


@pytest.mark.parametrize("error", [RuntimeError("can't allocate\nmemory"), MemoryError("no more")])
def test_memory_that_the_pool_does_not_get_stops_the_start_with_one_line(monkeypatch, error):
    def refuse(*_args, **_more):
        raise error

    monkeypatch.setattr(CheckpointPool, "__init__", refuse)
    with pytest.raises(SystemExit) as stopped:
        store_over(monkeypatch, shared=False, checkpoint_slots=4)
    line = str(stopped.value)
    assert line.startswith("statecache: no memory for 4 native checkpoints: ")
    assert line.endswith(": lower --statecache-checkpoint-slots")
    assert "\n" not in line


def test_a_pool_that_is_larger_than_the_memory_stops_the_start_with_one_line(monkeypatch):
    with pytest.raises(SystemExit, match=r"^statecache: no memory .* bytes on cpu, .* are free"):
        store_over(monkeypatch, shared=False, checkpoint_slots=10**9)
