"""Runs a user's script as __main__: a file, or a module as `python -m` runs it.

A job names a module by its script `-m pkg.train`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import runpy
import sys
from pathlib import Path

from holdfast.engine.state.store.regular_files import read_json

MODULE_MARK = "-m "
SOURCES_FILE = "sources.json"  # its name in every run directory
SOURCES_MAX = 200  # digested files next to the script


def name_of_module(script: str) -> str:
    """Return the name of the module that a script stands for; empty if it is a file."""
    return script.removeprefix(MODULE_MARK) if script.startswith(MODULE_MARK) else ""


def find_source(cwd: str | os.PathLike[str], script: str) -> Path | None:
    """Return the script's file in this folder; None if there is none."""
    paths = [Path(cwd, script)]
    if module := name_of_module(script):
        base = Path(cwd, *module.split("."))
        paths = [base.with_suffix(".py"), base / "__main__.py"]
    return next((each for each in paths if each.is_file()), None)


def is_present(cwd: str | os.PathLike[str], script: str) -> bool:
    """Return whether a script can be run from this folder; a module may also be installed."""
    if find_source(cwd, script) is not None:
        return True
    package = name_of_module(script).partition(".")[0]
    return package.isidentifier() and importlib.util.find_spec(package) is not None


def encode_sources(cwd: str | os.PathLike[str], script: str) -> bytes:
    """Return the contents of the file in which a run keeps digests of its script's sources."""
    return json.dumps(_digest_sources(cwd, script), indent=2).encode()


def changed_sources(run_dir: Path, cwd: str | os.PathLike[str], script: str) -> list[str]:
    """Return the script's files that were changed since the run began; none if not known."""
    try:
        before = read_json(run_dir / SOURCES_FILE)
        now = _digest_sources(cwd, script)
        changed = [name for name, digest in before.items() if now.get(name) != digest]
    except (OSError, ValueError, AttributeError):
        return []
    return [name for name in changed if name.isprintable()]


def _digest_sources(cwd: str | os.PathLike[str], script: str) -> dict[str, str]:
    """Return digests of the script and of the Python files next to it, by their names."""
    source = find_source(cwd, script)
    if source is None:
        return {}
    beside = sorted(each for each in source.parent.glob("*.py") if each != source)
    found: dict[str, str] = {}
    for path in [source, *beside[:SOURCES_MAX]]:
        with contextlib.suppress(OSError):
            found[path.name] = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    return found


def become(argv: list[str]) -> None:
    """Set arguments and search path as python itself does for a script."""
    sys.argv = argv
    is_module = bool(name_of_module(argv[0]))
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(argv[0]))


def run(script: str) -> None:
    """Run the script in this process. Its file has its whole path, as python itself gives it."""
    if module := name_of_module(script):
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(os.path.abspath(script), run_name="__main__")
