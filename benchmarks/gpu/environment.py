"""Prepares an environment for `make gpu`: it sees the packages of this Python, and a list says what more it needs.

Run: PYTHON benchmarks/gpu/environment.py FOLDER, where PYTHON has torch and transformers and made the environment in
FOLDER. Written there: a .pth file that names PYTHON's folders of packages, and requirements.txt, what pyproject.toml
says the library needs.
"""

import sys
import sysconfig
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main(folder: Path) -> None:
    """Write both files."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    seen = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (folder / "lib" / version / "site-packages" / "packages_of_python.pth").write_text("\n".join(seen) + "\n")
    with (ROOT / "pyproject.toml").open("rb") as file:
        needed = tomllib.load(file)["project"]["dependencies"]
    (folder / "requirements.txt").write_text("\n".join(needed) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
