"""`statecache doctor` beside the installed SGLang, as it is and with one method moved."""

import json
import subprocess
import sys

from server import STANDINS, environment

from statecache.engine.seams import is_broken, probe
from statecache.tools.engine_source import probe_source
from statecache.tools.source_tree import SourceTree
from statecache_sglang.seam_table import RECORDING_SEAMS, SEAMS, TESTED, VIEWS
from support.moved_seam import plant
from support.planted_source import copy_with, folder_of


def doctor(path=None):
    variables = {**environment(), "PYTHONPATH": f"{path}:{STANDINS}" if path else str(STANDINS)}
    command = [sys.executable, "-P", "-m", "statecache", "doctor", "--engine", "sglang"]
    return subprocess.run(
        [*command, "--json", "-"], capture_output=True, text=True, timeout=600, env=variables
    )


READ = "sglang.srt.managers.schedule_batch.Req.full_untruncated_fill_ids"


def test_it_would_work_here_and_every_seam_and_attribute_is_listed():
    done = doctor()
    report = json.loads(done.stdout)
    assert (report["works"], done.returncode) == (True, 0)
    found = report["engines"]["sglang"]
    assert found["version"] in TESTED == tuple(found["tested"])
    used = {f"{seam.module}.{seam.path}" for seam in (*SEAMS, *RECORDING_SEAMS)}
    assert used | {READ} <= found["seams"].keys()
    assert not any(map(is_broken, found["seams"].values()))


def test_a_moved_seam_is_named(tmp_path):
    done = doctor(
        plant(tmp_path, "sglang.srt.managers.schedule_policy", "PrefillAdder", "add_one_req")
    )
    report = json.loads(done.stdout)
    assert (report["works"], done.returncode) == (False, 1)
    seam = "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req"
    assert report["engines"]["sglang"]["seams"][seam] == "moved (takes self, other)"
    problems = [finding["text"] for finding in report["findings"] if finding["level"] == "problem"]
    assert problems == [f"moved (takes self, other): {seam}"]
    looked_at = report["engines"]["sglang"]
    total, version = len(looked_at["seams"]), looked_at["version"]
    assert total > len((*SEAMS, *RECORDING_SEAMS))
    in_place = f"{total - 1} of {total} seams are in place"
    notes = [finding["text"] for finding in report["findings"] if finding["level"] == "note"]
    assert f"SGLang {version}: {in_place}; a tested version" in notes


TABLE = ((*SEAMS, *RECORDING_SEAMS), VIEWS)


def test_the_source_says_what_the_import_does():
    source = probe_source(SourceTree(folder_of("sglang").parent), *TABLE)
    assert source == probe(*TABLE)


PLANTED = {
    "srt/managers/schedule_policy.py": [("def add_chunked_req(", "def add_chunk(")],
    "srt/managers/scheduler_components/invariant_checker.py": [
        ("def _requests_owning_rows(self)", "def _requests_owning_rows(self, rows=None)")
    ],
    "srt/mem_cache/base_prefix_cache.py": [("    full_kv_hit_length: int = 0\n", "")],
    "srt/mem_cache/unified_cache/unified_tree_core_interface.py": [
        ("    full_value_len: Optional[int]\n", "")
    ],
}


def test_planted_changes_are_found_in_the_source_as_by_the_import(tmp_path):
    """A renamed method, one more argument, a field gone, a tuple that is shorter."""
    copy_with(tmp_path, "sglang", PLANTED)
    planted = dict(probe_source(SourceTree(tmp_path), *TABLE))
    before = dict(probe(*TABLE))
    found = {name.rpartition("srt.")[2]: s for name, s in planted.items() if s != before[name]}
    node = found.pop("mem_cache.unified_cache.unified_tree_core_interface.TreePathNodeInfo")
    assert node.startswith("off: the Rust tree core (")
    assert "moved (takes node_id, parent_id, path_start, path_end" in node
    assert "full_value_len" not in node
    assert found == {
        "managers.schedule_policy.PrefillAdder.add_chunked_req": "missing",
        "managers.scheduler_components.invariant_checker.SchedulerInvariantChecker"
        "._requests_owning_rows": "moved (takes self, rows)",
        "mem_cache.base_prefix_cache.MatchResult.full_kv_hit_length": "missing",
    }
    assert json.loads(doctor(tmp_path).stdout)["engines"]["sglang"]["seams"] == planted
