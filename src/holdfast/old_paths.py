"""Lets scripts import public modules by the paths that these had before."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from importlib.abc import Loader

# The longest path that fits counts; modules below it follow.
PATHS = {
    "holdfast.servers": "holdfast.tables",
    "holdfast.integrations": "holdfast.trainers",
    "holdfast.integrations.lightning_loggers": "holdfast.reports.lightning_loggers",
    "holdfast.integrations.otel": "holdfast.reports.otel",
    "holdfast.integrations.trackers": "holdfast.reports.trackers",
    "holdfast.train": "holdfast.engine.train",
    "holdfast.testing": "holdfast.lab.contracts",
    "holdfast.testing.local_run": "holdfast.engine.runtime.local_run",
}
_LONGEST_FIRST = sorted(PATHS, key=len, reverse=True)
# Their modules have gone to different packages.
PARTED = ("holdfast.integrations", "holdfast.testing")


def path_now(name: str) -> str:
    """Return the present path of a module; empty if it never had this one."""
    if not name.startswith("holdfast."):
        return ""
    for old in _LONGEST_FIRST:
        if name == old or name.startswith(f"{old}."):
            return PATHS[old] + name[len(old) :]
    return ""


class OldPaths:
    """Finds and loads modules by their old paths: each stays one module, whichever path is used.

    It has no base class of importlib.abc, which every process would take 16 ms to import.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not path_now(fullname):
            return None
        return ModuleSpec(fullname, cast("Loader", self), is_package=fullname in PATHS)

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to Python to create an empty module."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the present module in the place of the new one, but for a package that was parted."""
        if module.__name__ not in PARTED:
            sys.modules[module.__name__] = import_module(path_now(module.__name__))


def install() -> None:
    """Have imports find the old paths before those that packages have, which would load a copy."""
    sys.meta_path.insert(0, OldPaths())
