"""Every command that README and docs show is one that statecache or the adapters take."""

import argparse
import re
import shlex
from pathlib import Path

import pytest
import typer

from statecache.cli.main import app
from statecache.engine.settings import add_flags
from statecache.engine.spec import engine_named

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(start: str) -> list[str]:
    """Indented lines that begin with `start`; usage with [choices] or (remarks) is left out."""
    found = []
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        for line in re.findall(rf"^    ({start} .*)$", text, re.M):
            command = line.split(" # ")[0].strip()
            if not set(command) & set("[]|"):
                found.append(command)
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("command", commands("statecache"))
def test_a_command_of_statecache_parses(command: str) -> None:
    """Options, values and arguments are taken; nothing is run."""
    words = shlex.split(command)[1:]
    group = typer.main.get_command(app)
    context = typer.Context(group, info_name="statecache")
    while words and hasattr(group, "commands"):
        group = group.commands[words.pop(0)]
    group.make_context("statecache", words, parent=context)


def test_there_are_commands_of_every_kind() -> None:
    named = {command.split()[1] for command in commands("statecache")}
    assert {"doctor", "fit", "generate", "replay"} <= named


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_flag_of_a_server_is_one_that_its_adapter_has(engine: str) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, engine_named(engine))
    known = {option for action in parser._actions for option in action.option_strings}
    for page in PAGES:
        for line in re.findall(rf"^    {engine} serve .*$", page.read_text(), re.M):
            used = re.findall(r"--(?:statecache|kv-cache-plugin)[\w-]*", line)
            assert used
            assert set(used) <= known


def test_every_file_that_a_page_links_to_is_there() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_files_that_contributing_names_are_there() -> None:
    """Paths begin at the root, or where the table before them says."""
    starts = [ROOT, ROOT / "plugin/statecache", ROOT / "cpp/src", ROOT / "cpp/src/index"]
    starts += [*ROOT.glob("integrations/*"), *ROOT.glob("integrations/*/statecache_*")]
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`([\w/<>.]+\.(?:cpp|cuh|h|md|py|sh|toml|txt))`", text)
    assert len(named) > 30
    for name in named:
        for engine in ("sglang", "vllm"):
            file = name.replace("<engine>", engine)
            assert any((start / file).exists() for start in starts), name


PAGES_OF_STEPS = ("adding-an-engine.md", "adding-a-policy.md", "how-it-works.md")


@pytest.mark.parametrize("page", PAGES_OF_STEPS)
def test_the_files_that_steps_name_are_there(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    named = re.findall(
        r"`((?:cpp|plugin|integrations|tests)/[\w/.]+|Makefile|pyproject\.toml)`", text
    )
    assert len(named) >= 3
    for name in named:
        assert (ROOT / name).exists(), name


NAMES = {
    "cpp/include/statecache/state_index.h": "insert touch pin unpin erase begin_walk next_victim "
    "evicted end_walk policy needs_prompts on_prompt",
    "cpp/src/index/tree_index.h": "TreeIndex gain_of children_changed lowest rank_changed removing",
    "cpp/src/index/policies.cpp": "kPolicies",
    "plugin/statecache/index/policies.py": "PolicySpec POLICIES REPLAY ENGINE",
    "plugin/statecache/index/reference.py": "ReferenceIndex",
    "plugin/statecache/engine/settings.py": "add_flags OPTIONAL",
    "plugin/statecache/engine/seams.py": "Seam check",
    "integrations/vllm/statecache_vllm/seam_table.py": "TESTED",
    "integrations/vllm/statecache_vllm/adapter.py": "register",
    "Makefile": "test-engines",
}


@pytest.mark.parametrize("file", NAMES)
def test_the_names_that_steps_use_are_in_the_code(file: str) -> None:
    steps = "".join((ROOT / "docs" / page).read_text() for page in PAGES_OF_STEPS)
    code = (ROOT / file).read_text()
    for name in NAMES[file].split():
        assert re.search(rf"\b{name}\b", steps), f"{name} is no step: take it out here"
        assert re.search(rf"\b{name}\b", code), f"{file} has no {name}"
