"""How large a function, a file, a constructor or a class may be.

A part of tidy.py. A limit is an alarm: code near it mixes several concepts.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tidy_modules import Finding, Module, functions, in_house, in_src, parameters
from tidy_sets import Function

FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 600
LINE_COLUMNS_MAX = 100
CONSTRUCTOR_PARAMETERS_MAX = 7
METHODS_MAX = 20
ATTRIBUTES_MAX = 15  # assigned by methods; the fields of a record do not count
SHORT_FILE_LINES = 40


def find_long_functions(modules: list[Module]) -> Iterator[Finding]:
    for module in modules:
        for function in functions(module):
            lines = (function.end_lineno or function.lineno) - function.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                yield Finding(module, function.lineno, f"{function.name} has {lines} lines")


def find_long_files(modules: list[Module]) -> Iterator[Finding]:
    for module in modules:
        lines = len(module.source.splitlines())
        if lines > FILE_LINES_MAX:
            yield Finding(module, FILE_LINES_MAX, f"has {lines} lines")


def find_long_lines(modules: list[Module]) -> Iterator[Finding]:
    for module in modules:
        for number, line in enumerate(module.source.splitlines(), 1):
            if len(line) > LINE_COLUMNS_MAX:
                yield Finding(module, number, f"has {len(line)} columns")


def find_wide_constructors(modules: list[Module]) -> Iterator[Finding]:
    for module in in_house(modules):
        for function in functions(module):
            count = len(parameters(function)) - 1
            if function.name == "__init__" and count > CONSTRUCTOR_PARAMETERS_MAX:
                yield Finding(module, function.lineno, f"__init__ takes {count} parameters")


def find_large_classes(modules: list[Module]) -> Iterator[Finding]:
    for module in in_src(modules):
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                methods, attributes = measure(node)
                if methods > METHODS_MAX or attributes > ATTRIBUTES_MAX:
                    size = f"{methods} methods and {attributes} attributes"
                    yield Finding(module, node.lineno, f"{node.name} has {size}")


def measure(node: ast.ClassDef) -> tuple[int, int]:
    """Return how many methods a class has, and how many attributes they assign."""
    methods = [each for each in node.body if isinstance(each, Function)]
    assigned = {
        each.attr
        for method in methods
        for each in ast.walk(method)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and ast.unparse(each.value) == "self"
    }
    return len(methods), len(assigned)


def find_short_files(modules: list[Module]) -> Iterator[Finding]:
    for module in in_src(modules):
        lines = len(module.source.splitlines())
        is_package = module.path.endswith("__init__.py")
        if lines < SHORT_FILE_LINES and not is_package:
            yield Finding(module, 1, f"has only {lines} lines")
