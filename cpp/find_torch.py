"""Print the folder of the torch that is being installed beside, or nothing.

Build isolation hides the environment being installed into from sys.path, but the interpreter still
is that environment's: its own site-packages are looked at first. Nothing is imported.
"""

import site
import sys
import sysconfig
from pathlib import Path

places = [sysconfig.get_path("platlib"), sysconfig.get_path("purelib")]
places += [*site.getsitepackages(), site.getusersitepackages(), *sys.path]
for place in dict.fromkeys(places):
    torch = Path(place or ".") / "torch"
    if (torch / "include/torch/csrc/stable/library.h").is_file():
        sys.stdout.write(str(torch))
        break
