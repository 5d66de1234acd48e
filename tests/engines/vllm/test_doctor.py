"""`statecache doctor` beside the installed vLLM, as it is and with one method moved."""

import json
import os
import subprocess
import sys

from statecache.engine.seams import probe
from statecache.tools.engine_source import probe_source
from statecache.tools.source_tree import SourceTree
from statecache_vllm.seam_table import SEAMS, TESTED, VIEWS
from support.moved_seam import plant, plant_changes
from support.planted_source import copy_with, folder_of


def doctor(path=None):
    variables = {
        **{k: v for k, v in os.environ.items() if not k.startswith("STATECACHE_")},
        "PYTHONPATH": str(path or ""),
    }
    command = [sys.executable, "-P", "-m", "statecache", "doctor", "--engine", "vllm"]
    return subprocess.run(
        [*command, "--json", "-"], capture_output=True, text=True, timeout=600, env=variables
    )


def test_it_would_work_here_and_every_seam_is_listed():
    done = doctor()
    report = json.loads(done.stdout)
    assert (report["works"], done.returncode) == (True, 0)
    found = report["engines"]["vllm"]
    assert found["version"] in TESTED == tuple(found["tested"])
    assert found["seams"].items() >= {f"{seam.module}.{seam.path}": "ok" for seam in SEAMS}.items()
    assert found["seams"]["vllm.v1.core.block_pool.BlockPool.null_block"] == "ok"
    assert set(found["seams"].values()) == {"ok"}


def test_a_moved_seam_is_named(tmp_path):
    done = doctor(plant(tmp_path, "vllm.v1.core.block_pool", "BlockPool", "touch"))
    report = json.loads(done.stdout)
    assert (report["works"], done.returncode) == (False, 1)
    seam = "vllm.v1.core.block_pool.BlockPool.touch"
    assert report["engines"]["vllm"]["seams"][seam] == "moved (takes self, other)"
    problems = [finding["text"] for finding in report["findings"] if finding["level"] == "problem"]
    assert problems == [f"moved (takes self, other): {seam}"]
    total, version = len(probe(SEAMS, VIEWS)), report["engines"]["vllm"]["version"]
    in_place = f"{total - 1} of {total} seams are in place"
    notes = [finding["text"] for finding in report["findings"] if finding["level"] == "note"]
    assert f"vLLM {version}: {in_place}; a tested version" in notes


def test_the_source_says_what_the_import_does():
    source = probe_source(SourceTree(folder_of("vllm").parent), SEAMS, VIEWS)
    assert source == probe(SEAMS, VIEWS)


PLANTED = {
    "v1/core/block_pool.py": [("def evict_blocks(", "def drop_blocks(")],
    "v1/core/kv_cache_utils.py": [("    ref_cnt: int = 0\n", "")],
    "v1/core/kv_cache_manager.py": [
        (
            "def remove_skipped_blocks(\n        self,",
            "def remove_skipped_blocks(\n        self, why,",
        )
    ],
}


def test_planted_changes_are_found_in_the_source_as_by_the_import(tmp_path):
    """A renamed method, one more argument, a field gone."""
    copy_with(tmp_path, "vllm", PLANTED)
    planted = dict(probe_source(SourceTree(tmp_path), SEAMS, VIEWS))
    before = dict(probe(SEAMS, VIEWS))
    assert {name.rpartition("core.")[2]: s for name, s in planted.items() if s != before[name]} == {
        "block_pool.BlockPool.evict_blocks": "missing",
        "kv_cache_utils.KVCacheBlock.ref_cnt": "missing",
        "kv_cache_manager.KVCacheManager.remove_skipped_blocks": "moved (takes self, why,"
        " request_id, processed_computed_tokens, num_prompt_tokens)",
    }
    assert json.loads(doctor(tmp_path).stdout)["engines"]["vllm"]["seams"] == planted


# A method renamed, an argument more, a field gone, a tuple shorter; and what is said of each.
CHANGES = {
    "vllm.v1.core.kv_cache_manager": """
KVCacheManager.release = KVCacheManager.free
del KVCacheManager.free
def get_computed_blocks(self, request, salt, limit=None) -> tuple[KVCacheBlocks, int, int]: ...
KVCacheManager.get_computed_blocks = get_computed_blocks
""",
    "vllm.v1.kv_cache_interface": """
from dataclasses import make_dataclass
KVCacheGroupSpec = make_dataclass("KVCacheGroupSpec", ["kv_cache_spec"])
""",
    "vllm.v1.core.sched.output": """
KVConnectorBlockState.__annotations__["boundary_state_offloads"] = dict[str, list[tuple[int, int]]]
""",
}
SAID = {
    "vllm.v1.core.kv_cache_manager.KVCacheManager.free": "missing",
    "vllm.v1.core.kv_cache_manager.KVCacheManager.get_computed_blocks": (
        "moved (takes self, request, salt, limit)"
    ),
    "vllm.v1.kv_cache_interface.KVCacheGroupSpec.layer_names": "missing",
    "vllm.v1.core.sched.output.KVConnectorBlockState.boundary_state_offloads": (
        "moved (has 2 items)"
    ),
}
START = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins
load_general_plugins()
arguments = EngineArgs(model=sys.argv[1], additional_config={"kv_cache_plugin": "statecache"})
try:
    arguments.create_engine_config()
except SystemExit as stopped:
    from vllm.v1.core.sched.scheduler import Scheduler
    changed = hasattr(Scheduler._mamba_block_aligned_split, "__wrapped__")
    print(json.dumps([str(stopped), str(arguments.kv_transfer_config), changed]))
"""


def test_planted_changes_are_found_by_the_doctor_and_at_start_before_anything_is_changed(
    tmp_path, model
):
    report = json.loads(doctor(plant_changes(tmp_path, CHANGES)).stdout)
    assert not report["works"]
    found = report["engines"]["vllm"]["seams"]
    assert {name: state for name, state in found.items() if state != "ok"} == SAID
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", START, str(model)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    line, transfer, changed = json.loads(done.stdout.splitlines()[-1])
    assert line.startswith("statecache: vLLM ")
    assert "does not fit" in line
    assert "\n" not in line
    assert (transfer, changed) == ("None", False)
