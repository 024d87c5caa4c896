"""Checks the files in a wheel and in a source package of Holdfast; `make release` runs it.

python tests/house/built_packages.py DIST VERSION
"""

from __future__ import annotations

import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "holdfast"
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt")


def needed_files() -> set[str]:
    """Return the names in a wheel of all files of the package: modules, static files, py.typed."""
    paths = (path for path in PACKAGE.rglob("*") if path.is_file())
    return {
        str(path.relative_to(PACKAGE.parent))
        for path in paths
        if path.suffix != ".pyc" and not path.name.startswith(".")
    }


def wheel_problems(names: Sequence[str], version: str) -> list[str]:
    """Return the problems of a wheel that holds these files."""
    described = f"holdfast-{version}.dist-info"
    found = {name for name in names if not name.startswith(f"{described}/")}
    needed = needed_files()
    problems = [f"the wheel lacks {name}" for name in sorted(needed - found)]
    problems += [f"the wheel holds {name}" for name in sorted(found - needed)]
    for name in ("METADATA", "entry_points.txt", "licenses/LICENSE"):
        if f"{described}/{name}" not in names:
            problems.append(f"the wheel lacks {described}/{name}")
    return problems


def source_problems(names: Sequence[str], version: str) -> list[str]:
    """Return the problems of a source package that holds these files."""
    root = f"holdfast-{version}/"
    needed = {*SOURCES, *(f"src/{name}" for name in needed_files())}
    problems = [
        f"the source package lacks {name}" for name in sorted(needed) if root + name not in names
    ]
    tests = [name for name in names if name.startswith(f"{root}tests/")]
    return problems + [f"the source package holds {name}" for name in tests]


def main(folder: str, version: str) -> int:
    """Print the problems of the packages in a folder. Status 1: there are some."""
    stem = Path(folder) / f"holdfast-{version}"
    with zipfile.ZipFile(f"{stem}-py3-none-any.whl") as wheel:
        problems = wheel_problems(wheel.namelist(), version)
    with tarfile.open(f"{stem}.tar.gz") as source:
        problems += source_problems(source.getnames(), version)
    for problem in problems:
        print(problem)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
