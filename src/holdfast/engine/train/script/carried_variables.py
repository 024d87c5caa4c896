"""Names what a script's loop over batches carries from one batch to the next, for messages.

It reads the script's source: variables that the loop's body reads before it sets them, attributes
and items that it sets, and variables that functions called there keep. That is a hint for a person,
never a verdict: what a library keeps is not seen, and nothing is named where there is no source.
"""

from __future__ import annotations

import ast
import dis
import linecache
import os
import threading
from collections.abc import Iterator, Sequence
from types import FrameType, FunctionType
from typing import Any

from holdfast.engine.train.step.script_lines import find_caller

NAMES_MAX = 3
_parsing = threading.Lock()  # Python 3.11 may fail where several threads parse at once


def parse_file(path: str, namespace: dict[str, Any] | None = None) -> ast.Module | None:
    """Return the syntax tree of a source file; None where there is none.

    `namespace`: the globals of the module, whose loader may have the source.
    """
    with _parsing:
        try:
            return ast.parse("".join(linecache.getlines(path, namespace)))
        except (SyntaxError, ValueError, SystemError, RecursionError):
            return None


def describe_carried() -> str:
    """Describe what the calling script's loop carries on; empty if nothing is found."""
    frame = find_caller()
    loop = None if frame is None else _loop_at(frame)
    if frame is None or loop is None:
        return ""
    names = list(dict.fromkeys([*_set_late(loop), *_find_names_set_by_calls(loop, frame)]))
    if not names:
        return ""
    which = join_names(names, NAMES_MAX)
    file = os.path.basename(frame.f_code.co_filename)
    return f"; the loop at {file}, line {loop.lineno}, carries {which} from one batch to the next"


def join_names(names: Sequence[str], most: int) -> str:
    """Write up to `most` names as a person would, and how many more there are."""
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def names_of_batch() -> set[str]:
    """Return the variables that the calling script's loop sets for each batch before it reads them.

    Their values come from the batch alone.
    """
    frame = find_caller()
    loop = None if frame is None else _loop_at(frame)
    if loop is None:
        return set()
    stored = {n.id for n in ast.walk(loop) if isinstance(n, ast.Name) and _stores(n)}
    return stored - set(_set_late(loop))


def find_loop(path: str) -> ast.For | None:
    """Return the calling script's loop over batches, if it stands in this file."""
    frame = find_caller()
    is_there = frame is not None and frame.f_code.co_filename == path
    return _loop_at(frame) if frame is not None and is_there else None


def _stores(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def _loop_at(frame: FrameType) -> ast.For | None:
    """Return the `for` statement at which a frame stands."""
    module = parse_file(frame.f_code.co_filename, frame.f_globals)
    if module is None:
        return None
    for each in ast.walk(module):
        if not isinstance(each, ast.For):
            continue
        if each.lineno <= frame.f_lineno <= (each.iter.end_lineno or each.lineno):
            return each
    return None


def _set_late(loop: ast.For) -> Iterator[str]:
    """Name what a loop reads before it sets it, and the attributes and items that it sets."""
    known = {each.id for each in _names(loop.target)}  # set before anything reads it
    early: set[str] = set()  # read before anything sets it
    for node in (part for each in loop.body for part in _walk_in_order(each)):
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                early |= {node.id} - known
            elif node.id in early:
                yield node.id
            else:
                known.add(node.id)
        elif isinstance(node, ast.Attribute | ast.Subscript) and _is_set(node):
            yield ast.unparse(node)


def _is_set(node: ast.Attribute | ast.Subscript) -> bool:
    return isinstance(node.ctx, ast.Store)


def _walk_in_order(node: ast.AST) -> Iterator[ast.AST]:
    """Walk over the parts of a statement as they run one after the other, without functions."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Lambda():
            return
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
            own = {n.id for each in node.generators for n in _names(each.target)}
            yield from (each for each in _names(node) if each.id not in own)
            return
        case ast.Assign(targets=targets, value=value):
            parts: list[ast.AST] = [value, *targets]
        case ast.AugAssign(target=ast.Name(id=name), value=value) if not _reads(value, name):
            parts = [value]  # a total that is only added to is no harm
        case ast.AugAssign(target=target, value=value):
            parts = [value, *_to_read(target), target]
        case ast.AnnAssign(target=target, value=value):
            parts = [*([value] if value else []), target]
        case ast.For(target=target, iter=source):
            parts = [source, target, *node.body, *node.orelse]
        case _:
            parts = list(ast.iter_child_nodes(node))
    for each in parts:
        yield from _walk_in_order(each)
    yield node


def _names(node: ast.AST) -> list[ast.Name]:
    return [each for each in ast.walk(node) if isinstance(each, ast.Name)]


def _reads(value: ast.AST, name: str) -> bool:
    return any(each.id == name for each in _names(value))


def _to_read(target: ast.AST) -> list[ast.AST]:
    return [ast.Name(target.id, ast.Load())] if isinstance(target, ast.Name) else []


def _find_names_set_by_calls(loop: ast.For, frame: FrameType) -> Iterator[str]:
    """Name the global and enclosing variables that functions called by name in a loop set."""
    for node in ast.walk(loop):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        found = frame.f_locals.get(node.func.id, frame.f_globals.get(node.func.id))
        if not isinstance(found, FunctionType):
            continue
        for each in dis.get_instructions(found.__code__):
            outer = each.argval in found.__code__.co_freevars
            if each.opname == "STORE_GLOBAL" or (each.opname == "STORE_DEREF" and outer):
                yield str(each.argval)
