"""Nothing that is installed unpickles, evaluates text or asks a shell: the linter refuses it."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUFF = (sys.executable, "-m", "ruff", "check")
FOLDERS = ("plugin", "integrations")
UNSAFE_LINES = {
    "import pickle\npickle.loads(b'')": "S301",
    "import marshal\nmarshal.loads(b'')": "S302",
    "import os\nos.system('ls')": "S605",
    "import subprocess\nsubprocess.run('ls', shell=True)": "S602",
    "eval('1')": "S307",
    "exec('1')": "S102",
}
UNPICKLERS = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}


def test_the_linter_refuses_what_runs_code_from_data() -> None:
    planted = "\n".join(UNSAFE_LINES)
    done = subprocess.run(
        [*RUFF, "--output-format=concise", "--stdin-filename=plugin/statecache/planted.py", "-"],
        input=planted,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    for code in UNSAFE_LINES.values():
        assert f" {code} " in done.stdout


def sources() -> list[Path]:
    return [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]


def test_no_line_switches_such_a_rule_off() -> None:
    assert len(sources()) > 80
    for path in sources():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if "noqa" in line:
                for code in UNSAFE_LINES.values():
                    assert code not in line, f"{path.name}:{number}"


def test_no_module_imports_an_unpickler_and_none_loads_with_torch() -> None:
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not UNPICKLERS & {alias.name.split(".")[0] for alias in node.names}, path
            elif isinstance(node, ast.ImportFrom) and node.module:
                assert node.module.split(".")[0] not in UNPICKLERS, path
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) != ("torch", "load"), path
