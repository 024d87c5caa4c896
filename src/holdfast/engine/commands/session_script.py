"""Writes a function of an interactive session as a script, with the definitions that it uses.

Workers are processes of their own, and bytes from another process must not become objects in them.
So the function travels as text: its source, the sources of functions and classes that it uses,
imports, and plain values as literals. Anything else is refused with its name.
"""

from __future__ import annotations
import __future__

import ast
import importlib
import inspect
import linecache
import os
import symtable
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

from holdfast.engine.core.errors import UserError

SESSION = "__main__"  # the module of what a session itself has defined
SHOWN_MAX = 60  # characters of a value
PLAIN = "numbers, strings, None, and lists, tuples, sets or dictionaries of them"
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def write_script(function: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """Return the script that calls this function. UserError names what cannot be written."""
    if not isinstance(inspect.unwrap(function), FunctionType) or not _is_plain_name(function):
        raise UserError(f"launch({function!r:.{SHOWN_MAX}}): give a function that def has named")
    name = function.__name__
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise UserError(f"{name}() cannot be called with these arguments: {error}") from None
    for key, value in arguments.items():
        if not _is_literal(value):
            raise UserError(f"arguments={{{key!r}: {value!r:.{SHOWN_MAX}}}}: give {PLAIN}")
    parts = _Parts(function)
    parts.add(name, function)
    lines = [
        f'"""Calls {name}(), a function of an interactive session; written by holdfast.launch."""',
        *parts.future,
        "import sys",
        f"sys.path[:] = {[os.path.abspath(each) for each in sys.path]!r}",
        *parts.texts,
        f'if __name__ == "__main__":\n    {name}(**{dict(arguments)!r})',
    ]
    return "\n\n".join(lines) + "\n"


class _Parts:
    """Collects definitions, each after the definitions that it uses."""

    def __init__(self, function: Callable[..., Any]) -> None:
        code = inspect.unwrap(function).__code__
        self._function = function.__name__
        self._session: Mapping[str, Any] = inspect.unwrap(function).__globals__
        self._known: set[str] = set()
        self.texts: list[str] = []
        postponed = code.co_flags & __future__.annotations.compiler_flag
        self.future = ["from __future__ import annotations"] if postponed else []

    def add(self, name: str, value: Any) -> None:
        """Add what gives `name` this value. UserError if a text cannot."""
        if name in self._known:
            return
        self._known.add(name)
        named = "" if getattr(value, "__name__", "") == name else f" as {name}"
        if isinstance(value, ModuleType):
            self.texts.append(f"import {value.__name__}{named}")
        elif _is_importable(value):
            self.texts.append(f"from {value.__module__} import {value.__name__}{named}")
        elif _is_literal(value):
            self.texts.append(f"{name} = {value!r}")
        else:
            self._add_definition(name, value)

    def _add_definition(self, name: str, value: Any) -> None:
        source = find_source(value) if _is_plain_name(value) else ""
        if not source:
            raise UserError(self._describe_refused(name, value))
        for used in sorted(set(_global_names(symtable.symtable(source, name, "exec")))):
            if used in self._session:
                self.add(used, self._session[used])
        self.texts.append(source)
        if value.__name__ != name:
            self.texts.append(f"{name} = {value.__name__}")

    def _describe_refused(self, name: str, value: Any) -> str:
        if "<locals>" in getattr(value, "__qualname__", ""):
            return f"{name} is defined inside another function: define it at the top of a cell"
        if isinstance(inspect.unwrap(value) if callable(value) else value, FunctionType | type):
            return (
                f"the source of {name} cannot be read in this session: write it into a file, and "
                "import it, or start that file by `holdfast run`"
            )
        return (
            f"{self._function}() uses {name}, a {type(value).__name__} of this session, which its "
            f"workers do not have: make it in {self._function}(), or give {PLAIN}"
        )


def find_source(value: Any) -> str:
    """Return the text of a function or class that a session has defined; "" if it is not known."""
    value = inspect.unwrap(value)
    code = getattr(value, "__code__", None)
    for path in [code.co_filename] if code is not None else _files_of_class(value):
        lines = linecache.getlines(path)
        try:
            tree = ast.parse("".join(lines))
        except SyntaxError:
            continue
        for node in reversed([each for each in ast.walk(tree) if isinstance(each, _Definition)]):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if node.name == value.__name__ and (code is None or first == code.co_firstlineno):
                return textwrap.dedent("".join(lines[first - 1 : node.end_lineno]))
    return ""


def _files_of_class(found: type) -> Iterator[str]:
    """Yield where a class may be defined: where its methods are, then in cells, newest first."""
    for each in vars(found).values():
        code = getattr(inspect.unwrap(each) if callable(each) else each, "__code__", None)
        if code is not None:
            yield code.co_filename
    yield from (path for path in reversed(list(linecache.cache)) if not os.path.exists(path))


def _global_names(table: symtable.SymbolTable) -> Iterator[str]:
    """Yield the names that a source takes from its module."""
    for symbol in table.get_symbols():
        if symbol.is_global() or (table.get_type() == "module" and symbol.is_referenced()):
            yield symbol.get_name()
    for child in table.get_children():
        yield from _global_names(child)


def _is_plain_name(value: Any) -> bool:
    """Return whether a definition stands on its own: not a lambda, nor in another function."""
    name = getattr(value, "__qualname__", "")
    return str(name).isidentifier() and name == getattr(value, "__name__", "")


def _is_importable(value: Any) -> bool:
    """Return whether the value is what its module has under its name."""
    module, name = getattr(value, "__module__", None), getattr(value, "__name__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module == SESSION:
        return False
    try:
        return getattr(importlib.import_module(module), name, None) is value
    except ImportError:
        return False


def _is_literal(value: Any) -> bool:
    """Return whether the value comes back from its own text: it consists of plain types."""
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False
