"""The Python standard library's own source: real text that every machine with Python has.

Every `.py` file under sysconfig's `stdlib` folder, one document each, named by its posix path
relative to that folder. Left out, so that builds of one Python version give about the same text:

- installed packages (`site-packages`, `dist-packages`) and `__pycache__`;
- test folders (`test`, `tests`), which Linux distributions do not ship;
- what distributions package apart: `distutils`, `ensurepip`, `idlelib`, `lib2to3`, `tkinter`,
  `turtledemo`;
- what is generated on the machine: `config-*` folders, `_sysconfigdata*.py`, `sitecustomize.py` and
  `usercustomize.py`.
"""

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from latte.data.corpus import Source

LEFT_OUT = {
    "__pycache__",
    "dist-packages",
    "distutils",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "site-packages",
    "sitecustomize.py",
    "test",
    "tests",
    "tkinter",
    "turtledemo",
    "usercustomize.py",
}
GENERATED = ("config-", "_sysconfigdata")


def sources() -> Iterator[Source]:
    """Yields the files of the corpus, sorted by name."""
    root = Path(sysconfig.get_path("stdlib"))
    names = []
    for folder, folders, files in os.walk(root):
        # Pruned here, since what is installed can be far more than the library.
        folders[:] = [name for name in folders if _belongs(name)]
        files = [Path(folder, name) for name in files if name.endswith(".py") and _belongs(name)]
        names += [file.relative_to(root).as_posix() for file in files]
    yield from (Source(name, root / name) for name in sorted(names))


def _belongs(name: str) -> bool:
    return name not in LEFT_OUT and not name.startswith(GENERATED)
