"""Reads the script's source for messages to people: what a loop carries on, clocks, coins.

It names the line at which a thread stands; the variables that a loop over batches carries from one
batch to the next; and where the script uses a clock, an address or a coin of its own. A clock that
is read twice within a millisecond nearly always has the same effect, and two workers may have drawn
the same coin. So repeated tasks agree, and so do workers, though another run of the job would give
other bits. Generators that are not keyed are found as they change (script_suspects.py).

The result is a hint for a person, never a verdict: variables that a library keeps are not seen, a
timer of a progress line does no harm, and no name is given where there is no source.
"""

from __future__ import annotations

import ast
import dis
import functools
import linecache
import os
import sys
import threading
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import torch

_PACKAGE = str(Path(__file__).resolve().parents[3])
_TRAIN = str(Path(__file__).resolve().parents[1])
_LIBRARIES = (os.path.dirname(os.__file__), os.path.dirname(os.path.dirname(torch.__file__)))
LINE_CHARS_MAX = 200
NAMES_MAX = 3
_parsing = threading.Lock()  # Python 3.11 may fail where several threads parse at once
SOURCES_MAX = 3  # the most that a message names
SOURCE_CHARS_MAX = 40
_ALWAYS = frozenset(
    {"id", "hash", "job.worker", "job.is_leader", "os.getpid", "os.urandom", "socket.gethostname"}
    | {"uuid.uuid1", "uuid.uuid4", "os.getloadavg", "gc.get_objects", "gc.get_count", "os.environ"}
    | {"random.SystemRandom", "threading.get_ident", "datetime.now", "datetime.datetime.now"}
    | {"torch.seed", "torch.random.seed", "os.stat", "os.times"}
)
_MODULES = ("time", "secrets")  # all of whose functions are
_CALM = frozenset({"time.sleep", "time.strftime", "secrets.compare_digest"})
_FILES = "/proc/"
TASK_SOURCE_CHARS_MAX = 60
COINS = frozenset(
    {"os.urandom", "os.getpid", "socket.gethostname", "uuid.uuid1", "uuid.uuid4"}
    | {"random.SystemRandom", "secrets.randbelow", "secrets.randbits", "secrets.choice"}
)
CLOCKS = frozenset(
    {f"time.{name}{suffix}" for name in ("time", "monotonic", "perf_counter", "process_time")
     for suffix in ("", "_ns")}
    | {"datetime.now", "datetime.datetime.now"}
)  # fmt: skip
TASK_FUNCTIONS = frozenset({"forward", "__getitem__", "collate", "collate_fn", "training_step"})
_TEXTS = frozenset({"str", "repr", "format", "print", "hex", "info", "debug", "strftime"})
_CALCULATES = (ast.Mult, ast.Mod, ast.Pow, ast.FloorDiv)


@functools.lru_cache(maxsize=4096)  # asked for in every step
def is_script(path: str) -> bool:
    """Return whether a source file is the user's: no library's, and not Holdfast's."""
    full = os.path.abspath(path)
    inside = (_PACKAGE, *_LIBRARIES)
    return not path.startswith("<") and not any(full.startswith(each + os.sep) for each in inside)


def find_caller() -> FrameType | None:
    """Return the innermost frame of the calling thread that is not of this package."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and os.path.abspath(frame.f_code.co_filename).startswith(_TRAIN):
        frame = frame.f_back
    return frame


def name_line(thread: int | None = None) -> str:
    """Return the script's line at which a thread stands: `train.py, line 12`; empty if in none.

    `thread`: its identifier; None: the calling one.
    """
    frame = sys._getframe() if thread is None else sys._current_frames().get(thread)
    each: FrameType | None = frame
    while each is not None:
        if is_script(each.f_code.co_filename):
            file = os.path.basename(each.f_code.co_filename)
            return f"{file}, line {each.f_lineno}"[:LINE_CHARS_MAX]
        each = each.f_back
    return ""


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
    """Describe the variables that the calling script's loop carries on; empty if there are none."""
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


def find_sources(files: Sequence[str]) -> list[str]:
    """Return the uses of clocks, addresses and coins in these source files, with their lines."""
    found: dict[str, str] = {}
    for path in files:
        module = parse_file(path)
        if module is None:
            continue
        for name, line, target in _uses(module):
            found.setdefault(f"{target}{name}", f"{target}{name} in line {line}")
    return list(found.values())


def _uses(module: ast.Module) -> Iterator[tuple[str, int, str]]:
    """Yield the name, the line, and the variable that is set from it, as `dice = `."""
    targets: dict[int, str] = {}
    calls = {id(n.func): n for n in ast.walk(module) if isinstance(n, ast.Call)}
    for node in ast.walk(module):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            for part in ast.walk(node.value):
                targets[id(part)] = f"{node.targets[0].id} = "
    for node in ast.walk(module):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            name = dotted_name(node)
            root = name.partition(".")[0]
            if (name in _ALWAYS or (root in _MODULES and "." in name)) and name not in _CALM:
                text = ast.unparse(calls.get(id(node), node))[:SOURCE_CHARS_MAX]
                yield text, node.lineno, targets.get(id(node), "")
        elif isinstance(node, ast.Constant) and str(node.value).startswith(_FILES):
            yield repr(node.value), node.lineno, targets.get(id(node), "")


def dotted_name(node: ast.AST) -> str:
    """Return a variable or attribute as it is written: `os.urandom`; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (inner := dotted_name(node.value)):
        return f"{inner}.{node.attr}"
    return ""


def find_task_sources(module: ast.Module, loop: ast.For | None) -> list[str]:
    """Return the expressions by which steps may depend on a clock or a coin, each with its line.

    `loop`: the script's loop over batches, if it is in this file.
    """
    coins, found = _coins_of(module), list[str]()
    for body, is_timed in _step_bodies(module, loop):
        for source, around in _uses_in_steps(body, coins, is_timed=is_timed):
            found.append(coins.get(dotted_name(source)) or _describe(around))
    return list(dict.fromkeys(found))


def _describe(node: ast.expr) -> str:
    try:
        text = ast.unparse(node)[:TASK_SOURCE_CHARS_MAX]
    except RecursionError:
        text = "a long expression"
    return f"{text} in line {node.lineno}"


def _coins_of(module: ast.Module) -> dict[str, str]:
    """Return the variables that are set from a coin, each with a description.

    Digits of a time are one as well: `time.time_ns() % 1000`.
    """
    found = {}
    for node in ast.walk(module):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, parts = node.targets[0].id, list(_numbers(node.value))
            if name not in map(dotted_name, parts) and any(map(_is_drawn, parts)):
                found[name] = f"{name} = {_describe(node.value)}"
    return found


def _is_drawn(part: ast.AST) -> bool:
    if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod):
        return any(dotted_name(each) in CLOCKS for each in _numbers(part.left))
    return dotted_name(part) in COINS


def _step_bodies(
    module: ast.Module, loop: ast.For | None
) -> Iterator[tuple[Sequence[ast.stmt], bool]]:
    """Yield what steps run: their loop's body, and functions; with True: people look at its clocks.

    A timer and a line that is printed now and then stand in the loop, or in a function that it
    calls after the batches.
    """
    functions = {n.name: n for n in ast.walk(module) if isinstance(n, ast.FunctionDef)}
    around = [] if loop is None else (_loop_around(module, loop) or loop).body
    yield around, True
    wanted = [name for name in functions if name in TASK_FUNCTIONS]
    wanted += _called_names([] if loop is None else loop.body)
    seen: set[str] = set()
    for names, is_timed in ((wanted, False), (_called_names(around), True)):
        while names:
            name = names.pop()
            if name in functions and name not in seen:
                seen.add(name)
                yield functions[name].body, is_timed
                names += _called_names(functions[name].body)


def _loop_around(module: ast.Module, loop: ast.For) -> ast.For | None:
    """Return the loop over steps, in which the one over batches stands."""
    loops = (each for each in ast.walk(module) if isinstance(each, ast.For))
    first, last = loop.lineno, loop.end_lineno or loop.lineno
    inner = [n for n in loops if n.lineno < first and last <= (n.end_lineno or 0)]
    return inner[-1] if inner else None  # outer ones come first


def _called_names(body: Iterable[ast.stmt]) -> list[str]:
    calls = (n.func for each in body for n in ast.walk(each) if isinstance(n, ast.Call))
    return [_name(func) for func in calls]


def _uses_in_steps(
    body: Sequence[ast.stmt], coins: Container[str], *, is_timed: bool
) -> Iterator[tuple[ast.AST, ast.expr]]:
    """Yield clocks and coins that steps compute with, and the smallest operand around each."""
    waiting: list[tuple[ast.AST, ast.expr | None, ast.expr | None]]
    waiting = [(each, None, None) for each in reversed(body)]
    while waiting:
        node, near_coin, near_clock = waiting.pop()
        if _is_text(node):
            continue
        name = dotted_name(node)
        if near_coin is not None and (name in COINS or name in coins):
            yield node, near_coin
        if near_clock is not None and name in CLOCKS:
            yield node, near_clock
        of_coins = list(_operands(node))
        of_clocks = list(_operands_of_clocks(node, is_timed=is_timed))
        for part in reversed(list(ast.iter_child_nodes(node))):
            coin = part if part in of_coins else near_coin
            clock = part if part in of_clocks else near_clock
            waiting.append((part, coin, clock))


def _operands(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the parts on which the value of an expression, or the next statement, depends."""
    match node:
        case ast.BinOp(left=left, right=right):
            yield from (left, right)
        case ast.Compare(left=left, comparators=comparators):
            yield from (left, *comparators)
        case ast.IfExp(test=test) | ast.If(test=test):
            yield test


def _operands_of_clocks(node: ast.AST, *, is_timed: bool) -> Iterator[ast.expr]:
    """Yield operands that are more than a time for people to look at."""
    match node:
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _CALCULATES):
            is_unit = isinstance(right, ast.Constant) or isinstance(left, ast.Constant)
            if isinstance(op, ast.Mod) or not is_unit:
                yield from (left, right)
        case ast.IfExp(test=test):
            yield test
        case ast.If(test=test) if not is_timed:
            yield test


def _numbers(node: ast.AST) -> Iterator[ast.AST]:
    """Walk over an expression, without texts that are made there."""
    waiting = [node]
    while waiting:
        part = waiting.pop()
        if not _is_text(part):
            yield part
            waiting += reversed(list(ast.iter_child_nodes(part)))


def _is_text(node: ast.AST) -> bool:
    match node:
        case ast.JoinedStr() | ast.BinOp(left=ast.Constant(value=str())):
            return True
        case ast.Attribute(attr="hex"):
            return True
        case ast.Call(func=func):
            return _name(func) in _TEXTS
    return False


def _name(func: ast.expr) -> str:
    """Return the last part of a function's name."""
    return func.attr if isinstance(func, ast.Attribute) else dotted_name(func)
