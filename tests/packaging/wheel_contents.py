"""What is in a wheel, as a CycloneDX 1.6 document: each file, its licence and where it comes from.

    python tests/packaging/wheel_contents.py WHEEL > CONTENTS.json

Nothing of another project is in it as a file; what the compiler put into an extension from headers
or static libraries is listed as a part of that extension, what must be installed beside it as a
requirement.
"""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

OURS = "Apache-2.0"
PYBIND11 = ("pybind11", "BSD-3-Clause", "headers")
LIBSTDCXX = ("libstdc++", "GPL-3.0-only WITH GCC-exception-3.1", "headers")
TORCH = ("torch", "BSD-3-Clause", "headers of the stable ABI")
CUDA = ("cuda-runtime", "LicenseRef-NVIDIA-CUDA-EULA", "static library and kernels' headers")
COMPILED_IN = {
    "_index": (PYBIND11, LIBSTDCXX),
    "_blocks": (PYBIND11, LIBSTDCXX),
    "_checkpoint_ops": (TORCH, LIBSTDCXX),
}


def parts_of(name: str, content: bytes) -> list[dict[str, Any]]:
    """Return what was compiled into an extension from elsewhere."""
    taken = COMPILED_IN[Path(name).name.split(".")[0]]
    if b"cudaLaunchKernel" in content or b"__cudaRegisterFatBinary" in content:
        taken = (*taken, CUDA)
    return [
        {"type": "library", "name": part, "licenses": [licence(text)], "description": how}
        for part, text, how in taken
    ]


def licence(text: str) -> dict[str, Any]:
    """Return a licence as CycloneDX writes it."""
    return {"expression": text} if " WITH " in text else {"license": {"id": text}}


def source_of(name: str) -> str:
    """Return the file or folder of the repository that `name` was made from."""
    if ".dist-info/" in name:
        last = Path(name).name
        return last if last in ("LICENSE", "NOTICE") else "pyproject.toml"
    if ".so" in name:
        return "cpp"
    package = name.split("/")[0]
    folder = "plugin" if package == "statecache" else f"integrations/{package.split('_')[1]}"
    return f"{folder}/{name}"


def contents(wheel: Path) -> dict[str, Any]:
    """Return the document."""
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in sorted(archive.namelist())}
    (about,) = (files[name] for name in files if name.endswith(".dist-info/METADATA"))
    told = Parser().parsestr(about.decode(), headersonly=True)
    components = []
    for name, content in files.items():
        component = {
            "type": "file",
            "name": name,
            "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(content).hexdigest()}],
            "licenses": [licence(OURS)],
            "properties": [{"name": "statecache:source", "value": source_of(name)}],
        }
        if ".so" in name:
            component["components"] = parts_of(name, content)
        components.append(component)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "name": told["Name"],
                "version": told["Version"],
                "licenses": [licence(OURS)],
                "properties": [
                    {"name": "statecache:requires", "value": text}
                    for text in told.get_all("Requires-Dist", [])
                    if "extra ==" not in text
                ],
            }
        },
        "components": components,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(contents(Path(sys.argv[1])), indent=1) + "\n")
