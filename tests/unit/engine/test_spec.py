"""An engine that registers itself is there everywhere, and no file of the core names one."""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import statecache
from statecache.engine import spec
from statecache.engine.settings import Settings, add_flags
from statecache.errors import SettingsError
from support.model_configs import QWEN3_NEXT
from support.toy_engine import make_toy_engine

ROOT = Path(__file__).parents[3]
CORE = ROOT / "plugin" / "statecache"


def test_no_file_of_the_core_names_an_engine() -> None:
    endings = (".py", ".pyi", ".jinja", ".h", ".cpp", ".cu", ".cuh")
    files = [f for core in (CORE, ROOT / "cpp") for f in core.rglob("*") if f.suffix in endings]
    assert len(files) > 150
    named = {
        f"{file.relative_to(ROOT)}:{at}": line.strip()
        for file in files
        for at, line in enumerate(file.read_text().splitlines(), 1)
        if re.search("(?i)vllm|sglang", line)
    }
    assert named == {}


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(make_toy_engine(tmp_path))
    spec.engines.cache_clear()
    yield tmp_path
    spec.engines.cache_clear()
    for name in [name for name in sys.modules if name.startswith(("statecache_toy", "toy_engine"))]:
        del sys.modules[name]


def command(toy: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run it where the toy engine is installed beside what is."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("STATECACHE_")}
    return subprocess.run(
        [sys.executable, "-P", "-m", "statecache", *words],
        capture_output=True,
        text=True,
        env={**environment, "PYTHONPATH": str(toy)},
    )


@pytest.mark.usefixtures("toy")
def test_an_engine_is_found_by_its_entry_point_in_the_order_of_names() -> None:
    assert [*spec.engines()] == ["sglang", "toy_engine", "vllm"]
    assert spec.engine_named("toy_engine").title == "Toy"
    with pytest.raises(SettingsError, match=r"^--engine: unknown engine 'tgi': use sglang, toy_e"):
        spec.engine_named("tgi")


@pytest.mark.usefixtures("toy")
def test_a_spec_does_not_import_its_engine() -> None:
    spec.engines()
    assert "toy_engine" not in sys.modules


def test_an_adapter_that_cannot_be_loaded_is_one_line(toy: Path) -> None:
    (toy / "statecache_toy" / "spec.py").write_text("import nothing_like_this\n")
    with pytest.raises(SettingsError) as caught:
        spec.engines()
    assert str(caught.value) == (
        "the adapter for toy_engine (statecache_toy.spec:SPEC) cannot be loaded: No module named"
        " 'nothing_like_this': reinstall or uninstall its package"
    )


@pytest.mark.usefixtures("toy")
def test_it_has_the_settings_it_takes_and_no_others() -> None:
    engine = spec.engine_named("toy_engine")
    parser = argparse.ArgumentParser()
    add_flags(parser, engine)
    assert "--statecache-checkpoint-interval" in parser.format_help()
    assert "--statecache-block-policy" not in parser.format_help()
    on = {"kv_cache_plugin": "statecache"}
    Settings.from_given({**on, "checkpoint_interval": 512}, {}).require_engine(engine)
    refused = {
        "block_policy": ("stock", "--statecache-block-policy is for vllm only"),
        "admission": ("dense", "--statecache-admission dense is not for Toy"),
    }
    for name, (value, message) in refused.items():
        with pytest.raises(SettingsError, match=f"^{message}$"):
            Settings.from_given({**on, name: value}, {}).require_engine(engine)
    sglang = spec.engine_named("sglang")
    with pytest.raises(SettingsError, match="-interval is for toy_engine and vllm only"):
        Settings.from_given({**on, "checkpoint_interval": 512}, {}).require_engine(sglang)


def test_the_doctor_looks_at_it(toy: Path) -> None:
    done = command(toy, "doctor", "--engine", "toy_engine", "--json", "-")
    report = json.loads(done.stdout)
    assert report["engines"]["toy_engine"] == {
        "version": "7.0",
        "tested": ["7.0"],
        "seams": {"toy_engine.Pool.touch": "ok"},
    }
    text = "Toy 7.0: 1 of 1 seams are in place; a tested version"
    assert {"about": "toy_engine", "level": "ok", "text": text} in report["findings"]
    assert done.returncode == 0


def test_plan_divides_memory_for_it(toy: Path) -> None:
    """A state of bf16 takes 39,518,208 bytes, 3 slots for each request."""
    (toy / "config.json").write_text(json.dumps(QWEN3_NEXT))
    request = {"input_length": 512, "output_length": 1, "hash_ids": [1]}
    lines = [{"timestamp": at, **request} for at in (0, 1_000)]
    (toy / "trace").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = command(
        toy, "plan", "--model", str(toy), "--memory", "4GiB", "--trace", str(toy / "trace"),
        "--engine", "toy_engine", "--running", "4", "--split", "10,20", "--json", "-",
    )  # fmt: skip
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert [
        (split["states"], split["share"], split["active_slots"]) for split in report["splits"]
    ] == [
        ("native", 10, 12),
        ("native", 20, 12),
        ("int8", 10, 12),
        ("int8", 20, 12),
    ]
    free = 4 * 2**30 - 12 * 39_518_208
    assert report["splits"][0]["kept_slots"] == free * 10 // 100 // 39_518_208
    assert report["best"]["toy_engine"]["flags"][1].startswith("--kept ")
    assert f"{statecache.__version__}" == report["version"]
