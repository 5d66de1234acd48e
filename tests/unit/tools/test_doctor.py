"""`statecache doctor`: in this environment, before small servers, and of GPUs' kernels."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest

from statecache.tools.doctor import _of_copies
from statecache.tools.doctor_child import TorchFound
from statecache.tools.doctor_server import look_at_server
from support.doctored import ACTIVE, WITHOUT_ENGINE, doctor, findings, server
from support.replay_support import assert_one_line, run


def test_without_an_engine_it_would_not_work_and_the_reason_is_said() -> None:
    done = doctor()
    if not any(find_spec(name) for name in ("sglang", "vllm")):
        assert "PROBLEM engines     no SGLang and no vLLM in " in done.stdout
        assert done.stdout.endswith("It would not work: 1 above.\n")
        assert (done.returncode, done.stderr) == (1, "")
    assert "ok      index       the native index works (" in done.stdout
    assert "ok      torch       torch 2." in done.stdout


def test_what_was_built_is_said() -> None:
    done = doctor("--json", "-")
    report = json.loads(done.stdout)
    assert report["torch"]["cpu_instructions"] in {"AVX-512", "AVX2", "baseline"}
    level, text = findings(done)["checkpoints"]
    assert level == "ok"
    assert text.startswith("copies of the checkpoint pool work on torch 2.")


@WITHOUT_ENGINE
def test_an_engine_asked_for_that_is_not_there_is_a_problem() -> None:
    done = doctor("--engine", "sglang", "--json", "-")
    text = f"SGLang is not installed in {sys.executable}"
    assert findings(done)["sglang"] == ("problem", text)


def test_bad_options_are_one_line(tmp_path: Path) -> None:
    assert_one_line(run("doctor", "--engine", "tgi"), "unknown engine 'tgi': use sglang, vllm")
    assert_one_line(run("doctor", "--url", "localhost:3"), "--url: 'localhost:3' is no address")
    assert_one_line(run("doctor", "--json", tmp_path / "no" / "f"), "--json: there is no directory")


UNREADABLE = "has a line of statecache_active that cannot be read: 'statecache_active"


OTHER = "# HELP up it\nup 1.0\nstatecache_states_resident 5.0\n"


@pytest.mark.parametrize(
    ("body", "level", "said"),
    [
        (f"{OTHER}{ACTIVE}1.0\n", "ok", "the plugin is active (engine sglang, policy gds)"),
        (f"{ACTIVE}0.0\n", "problem", "loaded but the engine decides (engine sglang, policy gds)"),
        (f"{ACTIVE}1.0\n{ACTIVE}0.0\n", "problem", "the engine decides"),
        (OTHER, "problem", "has no statecache_active: the plugin is not there"),
        ("", "problem", "has no statecache_active"),
        ("statecache_active_total 1\n", "problem", "has no statecache_active"),
        ("statecache_active 1\n", "ok", "the plugin is active"),
        ('statecache_active{engine="a,}\\"b", policy="gds",} 1 17\n', "ok", "policy gds"),
        ('statecache_active{engine="x"} abc\n', "problem", UNREADABLE),
        ('statecache_active{engine="x" 1\n', "problem", UNREADABLE),
        ("statecache_active{engine=x} 1\n", "problem", UNREADABLE),
        ("statecache_active\n", "problem", UNREADABLE),
        (f"{ACTIVE}1.0\n{ACTIVE}\x1b[2J\n", "problem", UNREADABLE),
        (f"{ACTIVE}{'1' * 5_000}x\n", "problem", UNREADABLE),
    ],
)
def test_a_server_is_judged_by_its_metrics(body: str, level: str, said: str) -> None:
    with server(200, body) as url:
        assert look_at_server(f"{url}/")[0] == level
        assert said in look_at_server(url)[1]
        assert look_at_server(url)[1].isprintable()


def test_a_server_without_metrics_and_none_at_all_are_problems() -> None:
    with server(404, "") as url:
        level, text, _ = look_at_server(url)
    assert level == "problem"
    assert "/metrics answers 404: whether it is active is unknown" in text
    level, text, _ = look_at_server(url)  # closed by now
    assert level == "problem"
    assert "/metrics cannot be read ([Errno 111] Connection refused)" in text


@WITHOUT_ENGINE
def test_with_a_server_elsewhere_no_engine_is_needed_here() -> None:
    with server(200, "statecache_active 1.0\n") as url:  # it does not say of which engine
        done = doctor("--url", url)
        assert "note    engines     no SGLang and no vLLM" in done.stdout
        assert done.stdout.endswith("It would work.\n")
        assert done.returncode == 0
    assert doctor("--url", url).returncode == 1


def copies_found(**changes):
    """What the doctor says of the copies where torch sees these GPUs."""
    found = TorchFound(
        torch="2.15.0",
        cuda="13.0",
        devices=["A", "B"],
        capabilities=["9.0", "12.0"],
        cpu_instructions="AVX2",
        cuda_architectures="80-real,90-real",
    )
    return _of_copies(msgspec.structs.replace(found, **changes))


def test_kernels_that_work_on_every_gpu() -> None:
    found = copies_found(broken=["", ""])
    assert found.level == "ok"
    assert found.text.endswith("AVX2, CUDA 80-real,90-real")


def test_a_gpu_without_a_kernel_is_named_with_what_the_build_lacks() -> None:
    reason = "launch failed: no kernel image is available for execution on the device"
    found = copies_found(broken=["", reason])
    assert found.level == "note"
    assert f"the kernels do not work on B (12.0): {reason}: plain torch operators" in found.text
    assert "-C cmake.define.CMAKE_CUDA_ARCHITECTURES=120" in found.text
    assert " A " not in found.text


def test_a_driver_too_old_for_every_gpu() -> None:
    reason = "launch failed: CUDA driver version is insufficient for CUDA runtime version"
    found = copies_found(broken=[reason, reason])
    assert f"A (9.0): {reason}; B (12.0): {reason}" in found.text
    assert found.text.endswith("CMAKE_CUDA_ARCHITECTURES=120;90")
