"""Whether the plugin would work here: the extension, torch, the engines' seams, a running server.

Nothing of an engine, and not the extension itself, is loaded into this process: `doctor_child`
looks at each in a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import entry_points, version
from typing import TypeVar

import msgspec

from statecache.engine.seams import features_off, is_broken
from statecache.engine.spec import EngineSpec, engines
from statecache.errors import escape_control_chars, group_by_reason
from statecache.tools.doctor_child import EngineFound, ExtensionFound, TorchFound
from statecache.tools.doctor_server import look_at_server

__all__ = ["Finding", "Report", "examine"]

_SECONDS = 300
_PLUGIN = "statecache"  # as the engines know it
_Found = TypeVar("_Found")


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


class _LookError(Exception):
    """A look did not come to an end; the message is one line."""


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
    for spec in present if engine is None else known:
        step(spec.title)
        for name, what in spec.extensions.items():
            findings.append(_of_extension(name, what))
        findings += _of_engine(spec, seen)
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


def _look(what: str, kind: type[_Found]) -> _Found:
    """Have `doctor_child` look at something. Raises `_LookError`."""
    command = [sys.executable, "-P", "-m", "statecache.tools.doctor_child", what]
    try:
        done = subprocess.run(  # noqa: S603 - this Python
            command, capture_output=True, timeout=_SECONDS, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise _LookError(f"no answer within {_SECONDS} s") from None
    if done.returncode == 0:
        return msgspec.json.decode(done.stdout, type=kind)
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    reason = escape_control_chars(lines[-1].strip()) if lines else "no word on stderr"
    if done.returncode < 0:
        raise _LookError(f"crashed with signal {-done.returncode} ({reason})")
    raise _LookError(reason)


def _of_extension(about: str, what: str) -> Finding:
    try:
        found = _look(about, ExtensionFound)
    except _LookError as error:
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
        found = _look("torch", TorchFound)
    except _LookError as error:
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
    if found.devices and not found.cuda_architectures:
        why = "built without CUDA kernels: plain torch operators move states on the GPU, slowly"
    elif old:
        why = f"the kernels need compute capability 8.0, not {old[0]}: plain torch operators there"
    else:
        return Finding("checkpoints", "ok", text)
    return Finding("checkpoints", "note", f"{text}; {why}")


def _is_installed(spec: EngineSpec) -> bool:
    return importlib.util.find_spec(spec.name) is not None


def _of_engine(spec: EngineSpec, seen: dict[str, EngineFound]) -> Iterator[Finding]:
    name, title, variable = spec.name, spec.title, spec.disable_variable
    if not _is_installed(spec):
        yield Finding(name, "problem", f"{title} is not installed in {sys.executable}")
        return
    if all(entry.name != _PLUGIN for entry in entry_points(group=spec.plugin_group)):
        yield Finding(name, "problem", f"{title} cannot find the plugin: reinstall statecache")
    chosen = None if variable is None else os.environ.get(variable)
    if chosen is not None and _PLUGIN not in chosen.split(","):
        yield Finding(name, "problem", f"{variable}={chosen} keeps {title} from loading it")
    try:
        found = seen[name] = _look(name, EngineFound)
    except _LookError as error:
        yield Finding(name, "problem", f"the seams of {title} cannot be looked at: {error}")
        return
    broken = [(seam, state) for seam, state in found.seams.items() if is_broken(state)]
    for state, those in group_by_reason(broken, "--seams"):
        yield Finding(name, "problem", f"{state}: {those}")
    for feature, reason in features_off([*found.seams.items()]).items():
        yield Finding(name, "note", f"{title} {found.version} works without {feature}: {reason}")
    in_place = sum(state == "ok" for state in found.seams.values())
    text = f"{title} {found.version}: {in_place} of {len(found.seams)} seams are in place"
    if found.version in found.tested:
        level = "note" if broken else "ok"  # the problems are said above
        yield Finding(name, level, f"{text}; a tested version")
        return
    strict = os.environ.get("STATECACHE_STRICT") == "1"
    tested = f"not a tested version (tested: {', '.join(found.tested)})"
    yield Finding(name, "problem" if strict else "note", f"{text}; {tested}")
