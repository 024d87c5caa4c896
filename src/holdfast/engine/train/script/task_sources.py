"""Finds in a script's source where its steps compute with a clock or with a coin of their own.

A clock that is read twice within a millisecond nearly always has the same effect, and two workers
may have drawn the same coin. So repeated tasks agree, and so do workers, though another run of the
job would give other bits. The result is a hint: only what looks like arithmetic counts, and a
timer, a file name or a line of a log does not.
"""

from __future__ import annotations

import ast
from collections.abc import Container, Iterable, Iterator, Sequence

from holdfast.engine.train.script.script_sources import dotted_name

TEXT_CHARS_MAX = 60
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


def find_task_sources(module: ast.Module, loop: ast.For | None) -> list[str]:
    """Return the expressions by which steps may depend on a clock or a coin, each with its line.

    `loop`: the script's loop over batches, if it is in this file.
    """
    coins, found = _coins_of(module), list[str]()
    for body, is_timed in _step_bodies(module, loop):
        for source, around in _uses(body, coins, is_timed=is_timed):
            found.append(coins.get(dotted_name(source)) or _describe(around))
    return list(dict.fromkeys(found))


def _describe(node: ast.expr) -> str:
    try:
        text = ast.unparse(node)[:TEXT_CHARS_MAX]
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


def _uses(
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
    """Yield operands that are more than a time that somebody looks at."""
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
