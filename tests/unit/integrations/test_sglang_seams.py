"""Only the seams of SGLang's adapter, and its benchmarks, import anything of SGLang."""

import ast
from pathlib import Path

import statecache_sglang
from statecache.engine.views import members_of
from statecache_sglang.unsupported import REFUSED, REFUSED_WITH_INT8
from statecache_sglang.views import ServerArguments

ADAPTER = Path(statecache_sglang.__file__).parent
LOADERS = {"load", "import_module", "__import__"}


def imports_the_engine(file: Path) -> bool:
    """Whether a file imports SGLang, or has what does: the loader of the seams."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in LOADERS:
            names = [str(argument.value) for argument in node.args if is_text(argument)]
        else:
            continue
        if any(name.split(".")[0] == "sglang" or name.endswith("seams.load") for name in names):
            return True
    return False


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_sglang_is_imported_by_the_seams_alone() -> None:
    found = {
        file.relative_to(ADAPTER).parts[0]
        for file in ADAPTER.rglob("*.py")
        if imports_the_engine(file)
    }
    assert found == {"seams", "bench"}


def test_every_argument_that_is_refused_is_a_seam() -> None:
    """One that was renamed would go through, or stop a server with a traceback."""
    assert {*members_of(ServerArguments)} >= {*REFUSED, *REFUSED_WITH_INT8}
