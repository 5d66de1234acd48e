"""Writes docs/seams.md from the adapters' tables: python tests/seams_page.py > docs/seams.md"""

import sys
from collections import defaultdict
from collections.abc import Sequence

from statecache.engine.patching import Patch
from statecache.engine.seams import Seam
from statecache.engine.spec import EngineSpec, engines
from statecache.engine.views import members_of

__all__ = ["seams_page"]

HEAD = """\
# What the plugin uses of each engine

Written from the tables of the adapters by `python tests/seams_page.py`. What is installed is
checked against them before anything is changed, and by `statecache doctor --seams`. A **patch**
is a change of the engine: all are made or none, and each says when it can go. A **hook** is a
change that is made when the plugin is loaded, by what the engine has for plugins, and never taken
back. A **seam** is a thing of the engine that is called or replaced. A **view** lists what is read
of an engine's objects.
"""


def seams_page() -> str:
    """Return the text of the page."""
    return HEAD + "".join(_of_engine(spec) for spec in engines().values())


def _of_engine(spec: EngineSpec) -> str:
    tested = ", ".join(spec.tested_versions)
    patches = "".join(_patch(patch) for patch in spec.patches)
    hooks = "".join(_patch(hook) for hook in spec.hooks)
    views = "".join(
        f"| `{view.target}` | {_code(members_of(view.protocol))} |\n" for view in spec.views
    )
    return (
        f"\n## {spec.title}\n\nTested with {tested}.\n"
        f"\n### Patches\n\n{patches}"
        + (f"\n### Hooks\n\n{hooks}" if hooks else "")
        + f"\n### Seams\n\n| module | names |\n|---|---|\n{_seams(spec.seams)}"
        f"\n### Views\n\n| class | attributes |\n|---|---|\n{views}"
    )


def _patch(patch: Patch) -> str:
    facts = {
        "why": patch.why,
        "upstream": patch.upstream,
        "can go when": patch.remove_when,
    }
    lines = [f"  - {name}: {text.rstrip('.')}\n" for name, text in facts.items() if text]
    return f"- `{patch.target}`\n{''.join(lines)}"


def _seams(seams: Sequence[Seam]) -> str:
    by_module: dict[str, list[str]] = defaultdict(list)
    for seam in seams:
        by_module[seam.module].append(seam.path)
    return "".join(f"| `{module}` | {_code(names)} |\n" for module, names in by_module.items())


def _code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    sys.stdout.write(seams_page())
