"""The supported versions of the engines that are not installed here, by their published wheels.

The seam tables are held against the source in each wheel; nothing of it is imported. `build/wheels`
keeps what was fetched, some hundred MB.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from engines.versions import ROOT, pinned, supported
from statecache.engine.seams import features_off, is_broken
from statecache.engine.spec import engines
from statecache.tools.engine_source import probe_source
from statecache.tools.source_tree import Binary, Module, SourceTree

OTHERS = [
    (engine, version)
    for engine, own in pinned().items()
    for version in supported(engine)
    if version != own
]
# What of a version is off, as docs/compatibility.md says.
OFF = {
    ("sglang", "0.5.22"): {
        "the Rust tree core (the Python one takes its place)",
        "the record of requests that are aborted while they wait",
        "the count of states past a stop that SGLang itself does not cache",
    }
}


class Planted(NamedTuple):
    """A line of a module that is another one, and what is then said of which seam."""

    module: str
    line: str
    instead: str
    seam: str
    said: str


# A method renamed, an argument more, a field gone.
PLANTED = {
    "sglang": (
        Planted(
            "sglang.srt.managers.schedule_policy",
            "def add_chunked_req(",
            "def add_chunk(",
            "PrefillAdder.add_chunked_req",
            "missing",
        ),
        Planted(
            "sglang.srt.managers.scheduler_components.invariant_checker",
            "def _requests_owning_rows(self)",
            "def _requests_owning_rows(self, rows=None)",
            "SchedulerInvariantChecker._requests_owning_rows",
            "moved (takes self, rows)",
        ),
        Planted(
            "sglang.srt.mem_cache.base_prefix_cache",
            "    full_kv_hit_length: int = 0\n",
            "",
            "MatchResult.full_kv_hit_length",
            "missing",
        ),
    ),
    "vllm": (
        Planted(
            "vllm.v1.core.block_pool",
            "def evict_blocks(",
            "def drop_blocks(",
            "BlockPool.evict_blocks",
            "missing",
        ),
        Planted(
            "vllm.v1.core.sched.scheduler",
            "def reset_connector_cache(self)",
            "def reset_connector_cache(self, why=None)",
            "Scheduler.reset_connector_cache",
            "moved (takes self, why)",
        ),
        Planted(
            "vllm.v1.core.kv_cache_utils",
            "    ref_cnt: int = 0\n",
            "",
            "KVCacheBlock.ref_cnt",
            "missing",
        ),
    ),
}


class PlantedTree(SourceTree):
    """A wheel in which one line of each of some modules is another one."""

    def __init__(self, root: zipfile.Path, planted: tuple[Planted, ...]) -> None:
        super().__init__(root)
        self._planted = {each.module: each for each in planted}

    def module(self, name: str) -> Module | Binary | None:
        """Return the module, changed if it is one of those."""
        change = self._planted.get(name)
        if change is None:
            return super().module(name)
        text = (self.root / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8")
        assert text.count(change.line) == 1, change
        return Module(self, name, text.replace(change.line, change.instead), is_package=False)


def fetched(engine: str, version: str) -> Path:
    """Return the wheel of a version; of vLLM the one for CPUs where there is one, it is smaller."""
    kept = ROOT / "build/wheels" / f"{engine}-{version}"
    kept.parent.mkdir(parents=True, exist_ok=True)
    for name in [f"{engine}-cpu", engine] if engine == "vllm" else [engine]:
        if kept.is_dir():
            break
        folder = tempfile.mkdtemp(dir=kept.parent)
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--only-binary",
            ":all:",
        ]
        command += ["--no-cache-dir", "-d", folder, f"{name}=={version}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            Path(folder).rename(kept)
        else:
            shutil.rmtree(folder)
    assert kept.is_dir(), done.stderr
    (wheel,) = kept.iterdir()
    return wheel


@pytest.fixture(scope="module", params=OTHERS, ids=lambda pair: "-".join(pair))
def published(request: pytest.FixtureRequest) -> Iterator[tuple[str, str, zipfile.Path]]:
    engine, version = request.param
    with zipfile.ZipFile(fetched(engine, version)) as wheel:
        yield engine, version, zipfile.Path(wheel)


def probed(engine: str, tree: SourceTree) -> dict[str, str]:
    spec = engines()[engine]
    return dict(probe_source(tree, spec.seams, spec.views))


def test_there_are_other_versions_than_the_pinned_ones() -> None:
    assert {engine for engine, _ in OTHERS} == {"sglang", "vllm"}


def test_no_difference_is_found_but_what_is_off_and_planted_changes_are(
    published: tuple[str, str, zipfile.Path],
) -> None:
    engine, version, root = published
    before = probed(engine, SourceTree(root))
    assert [name for name, state in before.items() if is_broken(state)] == []
    assert {*features_off(list(before.items()))} == OFF.get((engine, version), set())
    after = probed(engine, PlantedTree(root, PLANTED[engine]))
    assert {name: state for name, state in after.items() if state != before[name]} == {
        f"{each.module}.{each.seam}": each.said for each in PLANTED[engine]
    }
