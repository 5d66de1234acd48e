"""Whether the plugin would work here: the extension, torch, the engines' seams, a running server.

Nothing of an engine, and not the extension itself, is loaded into this process: `doctor_child`
looks at each in a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import entry_points, version

import msgspec

from statecache.engine.seams import features_off, is_broken
from statecache.engine.spec import EngineSpec, engines
from statecache.errors import group_by_reason
from statecache.tools.doctor_child import EngineFound, ExtensionFound, TorchFound
from statecache.tools.doctor_look import LookError, look
from statecache.tools.doctor_server import look_at_server

__all__ = ["Finding", "Report", "examine", "judge_engine"]

_PLUGIN = "statecache"  # as the engines know it


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at: `level` is "ok", "note" or "problem"."""

    about: str
    level: str
    text: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What the doctor found; `works` is False if there is a problem."""

    schema: str = "statecache.doctor/1"
    statecache: str
    python: str
    works: bool
    findings: list[Finding]
    torch: TorchFound | None
    engines: dict[str, EngineFound]


def examine(
    engine: str | None = None, url: str | None = None, step: Callable[[str], None] = lambda _: None
) -> Report:
    """Look at everything: at one `engine` or all that are installed, and at the server at `url`.

    Of a server that names its engine, only that one counts. `step` hears what is looked at next.
    """
    server = None
    if url is not None:
        step("the server")
        server = look_at_server(url)
    step("the index")
    findings = [_of_extension("index", "the native index"), *_of_settings(os.environ)]
    step("torch")
    torch, of_torch = _of_torch()
    findings += of_torch
    seen: dict[str, EngineFound] = {}
    known = list(engines().values())
    if engine is not None:
        known = [spec for spec in known if spec.name == engine]
    elif server is not None and server.engine in engines():
        known = [engines()[server.engine]]
    present = [spec for spec in known if _is_installed(spec)]
    asked = present if engine is None else known
    step(" and ".join(spec.title for spec in asked))
    # An import of an engine keeps a core busy, and its threads another one.
    with ThreadPoolExecutor(max(len(os.sched_getaffinity(0)) // 2, 1)) as pool:
        looks = {spec.name: pool.submit(look, spec.name, EngineFound) for spec in present}
        for spec in asked:
            for name, what in spec.extensions.items():
                findings.append(_of_extension(name, what))
            findings += _of_engine(spec, looks.get(spec.name), seen)
    if not present and engine is None:
        titles = " and no ".join(spec.title for spec in known)
        level = "problem" if url is None else "note"
        findings.append(Finding("engines", level, f"no {titles} in {sys.executable}"))
    if server is not None:
        findings.append(Finding("server", server.level, server.text))
    return Report(
        statecache=version("statecache"),
        python=platform.python_version(),
        works=all(finding.level != "problem" for finding in findings),
        findings=findings,
        torch=torch,
        engines=seen,
    )


def _of_extension(about: str, what: str) -> Finding:
    try:
        found = look(about, ExtensionFound)
    except LookError as error:
        advice = "reinstall statecache with pip in this Python"
        return Finding(about, "problem", f"{what} does not load: {error}: {advice}")
    return Finding(about, "ok", f"{what} works ({found.file})")


def _of_settings(environment: Mapping[str, str]) -> Iterator[Finding]:
    """What the environment says, read by itself so that a broken index does not hide the rest."""
    if not environment.get("STATECACHE_CONFIG") and not environment.get("STATECACHE_STRICT"):
        return
    try:
        from statecache.engine.settings import Settings

        given = Settings.from_environment(environment).given
    except ImportError:
        return  # said of the index
    except ValueError as error:
        yield Finding("settings", "problem", str(error))
    else:
        yield Finding("settings", "note", f"the environment sets {', '.join(given)}")


def _of_torch() -> tuple[TorchFound | None, list[Finding]]:
    if importlib.util.find_spec("torch") is None:
        text = "torch is not installed: replay and the index work, checkpoint pools do not"
        return None, [Finding("torch", "note", text)]
    try:
        found = look("torch", TorchFound)
    except LookError as error:
        return None, [Finding("torch", "problem", f"torch does not load: {error}")]
    cuda = f"CUDA {found.cuda}" if found.cuda else "without CUDA"
    gpus = [f"{name} ({c})" for name, c in zip(found.devices, found.capabilities, strict=True)]
    seen = f"GPUs: {', '.join(gpus)}" if gpus else "no GPU visible"
    findings = [Finding("torch", "ok", f"torch {found.torch}, {cuda}; {seen}"), _of_copies(found)]
    return found, findings


def _of_copies(found: TorchFound) -> Finding:
    if found.error is not None:
        # Without them a pool is slow, not wrong; a build that does not load is a wrong one.
        return Finding("checkpoints", "problem" if found.built else "note", found.error)
    kernels = f"CUDA {found.cuda_architectures}" if found.cuda_architectures else "no CUDA kernels"
    text = f"copies of the checkpoint pool work on torch {found.torch}:"
    text += f" {found.cpu_instructions}, {kernels}"
    old = [c for c in found.capabilities if int(c.partition(".")[0]) < 8]
    gpus = zip(found.devices, found.capabilities, found.broken, strict=False)
    broken = [(name, capability, reason) for name, capability, reason in gpus if reason]
    if found.devices and not found.cuda_architectures:
        why = "built without CUDA kernels: plain torch operators move states on the GPU, slowly"
    elif old:
        why = f"the kernels need compute capability 8.0, not {old[0]}: plain torch operators there"
    elif broken:
        where = "; ".join(f"{name} ({capability}): {reason}" for name, capability, reason in broken)
        missing = ";".join(sorted({capability.replace(".", "") for _, capability, _ in broken}))
        why = (
            f"the kernels do not work on {where}: plain torch operators there, slowly; if it is no"
        )
        why += f" old driver, build with -C cmake.define.CMAKE_CUDA_ARCHITECTURES={missing}"
    else:
        return Finding("checkpoints", "ok", text)
    return Finding("checkpoints", "note", f"{text}; {why}")


def _is_installed(spec: EngineSpec) -> bool:
    return importlib.util.find_spec(spec.name) is not None


def _of_engine(
    spec: EngineSpec, found: Future[EngineFound] | None, seen: dict[str, EngineFound]
) -> Iterator[Finding]:
    name, title, variable = spec.name, spec.title, spec.disable_variable
    if found is None:
        yield Finding(name, "problem", f"{title} is not installed in {sys.executable}")
        return
    if all(entry.name != _PLUGIN for entry in entry_points(group=spec.plugin_group)):
        yield Finding(name, "problem", f"{title} cannot find the plugin: reinstall statecache")
    chosen = None if variable is None else os.environ.get(variable)
    if chosen is not None and _PLUGIN not in chosen.split(","):
        yield Finding(name, "problem", f"{variable}={chosen} keeps {title} from loading it")
    try:
        seen[name] = found.result()
    except LookError as error:
        yield Finding(name, "problem", f"the seams of {title} cannot be looked at: {error}")
    else:
        yield from judge_engine(spec, seen[name])


def judge_engine(spec: EngineSpec, found: EngineFound) -> Iterator[Finding]:
    """Yield what is to be said of an engine that was looked at."""
    name, title = spec.name, f"{spec.title} {found.version}"
    broken = [(seam, state) for seam, state in found.seams.items() if is_broken(state)]
    for state, those in group_by_reason(broken, "--seams"):
        yield Finding(name, "problem", f"{state}: {those}")
    without = features_off([*found.seams.items()])
    for feature, reason in without.items():
        yield Finding(name, "note", f"{title} works without {feature}: {reason}")
    total = len(found.seams)
    text = f"{title}: {sum(state == 'ok' for state in found.seams.values())} of {total} seams are"
    text += " in place"
    if found.version in found.tested:
        level = "note" if broken else "ok"  # the problems are said above
        yield Finding(name, level, f"{text}; a tested version")
        return
    if not broken and not without:
        text = f"{title}: no difference was found in {total} seams"
    strict = os.environ.get("STATECACHE_STRICT") == "1"
    tested = f"not a tested version (tested: {', '.join(found.tested)})"
    yield Finding(name, "problem" if strict else "note", f"{text}; {tested}")
