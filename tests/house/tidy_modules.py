"""Reads the files that the house rules judge, and names the place of a finding.

A part of tidy.py; knows no rule.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from tidy_sets import Function

LABS = "tests/labs/"


@dataclass(frozen=True, kw_only=True)
class Module:
    """One Python file, with its path, its name and its syntax tree."""

    path: str  # relative to the repository's root, with forward slashes
    source: str
    tree: ast.Module

    @property
    def name(self) -> str:
        """`holdfast.engine.core.types` for files under src, otherwise the path itself."""
        if not self.path.startswith("src/"):
            return self.path
        dotted = self.path.removeprefix("src/").removesuffix(".py").replace("/", ".")
        return dotted.removesuffix(".__init__")

    @property
    def package(self) -> str:
        """`core` for holdfast.engine.core.types, "" for holdfast itself, "?" outside src."""
        parts = self.name.split(".")
        if parts[0] != "holdfast" or not self.path.startswith("src/"):
            return "?"
        return parts[1] if len(parts) > 1 else ""


@dataclass(frozen=True)
class Finding:
    module: Module
    line: int
    what: str


def parse(path: str, source: str) -> Module:
    return Module(path=path, source=source, tree=ast.parse(source, path, feature_version=(3, 10)))


def functions(module: Module) -> Iterator[Function]:
    for node in ast.walk(module.tree):
        if isinstance(node, Function):
            yield node


def parameters(function: Function) -> list[ast.arg]:
    a = function.args
    rest = [x for x in (a.vararg, a.kwarg) if x is not None]
    return [*a.posonlyargs, *a.args, *a.kwonlyargs, *rest]


def in_src(modules: list[Module]) -> Iterator[Module]:
    return (m for m in modules if m.path.startswith("src/"))


def in_house(modules: list[Module]) -> Iterator[Module]:
    """The package, and the laboratories that its tests and benchmarks share."""
    return (m for m in modules if m.path.startswith(("src/", LABS)))
