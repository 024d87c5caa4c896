"""Finds in a script's source the variables that it keeps outside of the job's state.

Some of it only one worker keeps: the best score so far under `if job.is_leader`, say, where a
worker that takes over has the first value. Other variables all workers change alike: a worker that
joins has the first value. Variables, attributes and items count if a later step computes or decides
by them. Clocks, and values that are only printed or logged, do no harm. The result is a hint for a
person, never a verdict.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from holdfast.engine.train.script.script_source import CLOCKS, dotted_name

TEXT_CHARS_MAX = 60
EVERYWHERE = "on all workers"  # stands for a condition that differs between workers
_NAMES = frozenset(
    {"is_leader", "is_main", "is_main_process", "is_local_main_process", "main_process"}
    | {"is_master", "master_process", "is_chief", "is_global_zero", "is_world_process_zero"}
    | {"is_rank_zero", "rank_zero", "local_rank", "global_rank", "node_rank"}
)
_FUNCTIONS = frozenset({"get_rank", "get_local_rank", "get_node_local_rank", "gethostname"})
_VARIABLES = frozenset({"RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID", "HOLDFAST_WORKER"})
_DECORATORS = frozenset({"rank_zero_only", "on_main_process", "on_local_main_process"})
_AGREEING = frozenset({"agree", "broadcast", "broadcast_object_list"})
_SHOWING = frozenset(
    {"print", "format", "str", "repr", "debug", "info", "warning", "log", "log_metrics", "len"}
    | {"add_scalar", "add_scalars", "log_metric", "set_postfix", "set_description", "write_line"}
)
_ADDING = frozenset({"append", "appendleft", "extend", "insert", "add", "update", "setdefault"})
_CONTAINERS = frozenset({"list", "dict", "set", "deque", "defaultdict", "Counter", "OrderedDict"})
_LITERALS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
_LEAVING = (ast.Return, ast.Continue, ast.Break, ast.Raise)


def find_leader_state(module: ast.Module) -> list[str]:
    """Return the variables that a file keeps on some workers only, each with its line."""
    file = _File(module)
    uses = (item for body in file.bodies() for item in body.uses.items())
    texts = (f"{name} in line {u.line} only if {u.condition}" for name, u in uses if u.is_kept)
    return list(dict.fromkeys(texts))


def find_step_state(module: ast.Module, loop: ast.For | None) -> list[str]:
    """Return the variables that steps change on all workers for later steps, with their lines.

    `loop`: the script's loop over batches, if it is in this file.
    """
    loops = (each for each in ast.walk(module) if isinstance(each, ast.For))
    tasks = next((each for each in loops if loop and each.lineno == loop.lineno), None)
    if tasks is None:
        return []
    file = _File(module)
    body = file.read_loop_around(tasks)
    return [
        f"{name} in line {use.line}"
        for name, use in body.uses.items()
        if use.is_needed and _root(name) not in file.protected
    ]


@dataclass(slots=True)
class _Use:
    """Collects how a piece of code uses one variable, attribute or item."""

    #: Where it is set under the condition; 0: nowhere.
    line: int = 0
    condition: str = ""
    #: All workers set it.
    is_common: bool = False
    #: Its new value depends on its old one.
    adds_up: bool = False
    decides: bool = False
    #: It decides a condition before it is set.
    decides_early: bool = False
    #: Set in the loop over batches.
    is_of_tasks: bool = False
    #: It is read in the loop over batches before it is set.
    is_read_in_tasks: bool = False

    @property
    def is_needed(self) -> bool:
        """Return whether steps set it between their tasks, and later ones need it."""
        is_read = self.decides_early or self.is_read_in_tasks or (self.adds_up and self.decides)
        return bool(self.line) and not self.is_of_tasks and is_read

    @property
    def is_kept(self) -> bool:
        """Return whether some workers only keep it, and decide something by it later."""
        is_read = self.decides_early or (self.adds_up and self.decides)
        return bool(self.line) and not self.is_common and is_read


class _File:
    """Knows a file's conditions that differ between workers, its containers and functions."""

    def __init__(self, module: ast.Module) -> None:
        self._module = module
        nodes = list(ast.walk(module))
        self._assigns = [n for n in nodes if isinstance(n, ast.Assign)]
        self._functions = [n for n in nodes if isinstance(n, _FUNCTION)]
        self._calls = [n for n in nodes if isinstance(n, ast.Call)]
        #: Variables that depend on the number of this worker.
        self._apart: set[str] = set()
        while new := {t for t in self._find_apart() if t not in self._apart}:
            self._apart |= new
        self.containers = {
            dotted_name(target)
            for each in self._assigns
            if isinstance(each.value, _LITERALS) or _find_called(each.value) in _CONTAINERS
            for target in each.targets
        }
        # what the job's state has, and the object through which it is reached
        self.protected = {"job", "self"}
        for call in self._calls:
            if _find_called(call) == "protect":
                self.protected |= {_root(_key(each.value)) for each in call.keywords}

    def read_loop_around(self, tasks: ast.For) -> _Body:
        """Read the outermost loop that has this loop over batches in it."""
        body = _Body(self, set(), tasks)
        for scope in [self._module, *self._functions]:
            for loop, after in self._outermost_loops(scope.body, ""):
                if any(each is tasks for each in ast.walk(loop)):
                    body.read_block([loop], EVERYWHERE)
                    body.read_after(after)
        return body

    def bodies(self) -> Iterator[_Body]:
        """Read each outermost loop, and each function, whose calls may follow each other."""
        alone = self._functions_of_one_worker()
        for scope in [self._module, *self._functions]:
            condition = alone.get(getattr(scope, "name", ""), "")
            for loop, after in self._outermost_loops(scope.body, condition):
                body = _Body(self, set())
                body.read_block([loop], "")
                body.read_after(after)
                yield body
            if isinstance(scope, _FUNCTION) and scope.name != "__init__":
                body = _Body(self, _local_names(scope))
                body.read_block(scope.body, condition)
                yield body

    def _outermost_loops(
        self, block: Sequence[ast.stmt], condition: str
    ) -> Iterator[tuple[ast.stmt, Sequence[ast.stmt]]]:
        """Yield the outermost loops that all workers go through, and the statements after each."""
        for i, (each, at, inner) in enumerate(self.blocks(block, condition)):
            if at:
                continue
            if isinstance(each, ast.For | ast.AsyncFor | ast.While):
                yield each, block[i + 1 :]
                continue
            for found, its in inner:
                yield from self._outermost_loops(found, its)

    def blocks(
        self, block: Sequence[ast.stmt], condition: str
    ) -> Iterator[tuple[ast.stmt, str, list[tuple[list[ast.stmt], str]]]]:
        """Yield a block's statements with their conditions, and their inner blocks with theirs.

        A condition is a text if it differs between workers, or "".
        """
        for each in block:
            inner = [(found, condition) for found in _inner_blocks(each)]
            after = condition
            if not condition and isinstance(each, ast.If) and self._is_apart(each.test):
                texts = _text(each.test), _text(_opposite(each.test))
                inner = [(each.body, texts[0]), (each.orelse, texts[1])]
                for (found, _), rest in zip(inner, texts[::-1], strict=True):
                    after = rest if found and isinstance(found[-1], _LEAVING) else after
            yield each, condition, inner
            condition = after

    def _find_apart(self) -> Iterator[str]:
        for each in self._assigns:
            if self._gives_worker(each.value):
                yield from map(dotted_name, each.targets)

    def _gives_worker(self, value: ast.expr) -> bool:
        """Return whether a variable that is set to this depends on the worker's number."""
        match value:
            case ast.Call(func=ast.Name(id="int" | "bool"), args=[inner]):
                return self._gives_worker(inner)
            case ast.Call(func=func, args=args):
                return any(map(self._depends_on_worker, [value, func, *args[:1]]))
            case ast.Subscript(slice=inner):
                return isinstance(inner, ast.Constant) and self._depends_on_worker(inner)
            case ast.Compare() | ast.BoolOp() | ast.UnaryOp() | ast.Name() | ast.Attribute():
                return self._is_apart(value)
        return False

    def _is_apart(self, node: ast.expr) -> bool:
        return any(self._depends_on_worker(part) for part in ast.walk(node))

    def _depends_on_worker(self, node: ast.AST) -> bool:
        match node:
            case ast.Compare(left=left, comparators=[ast.Constant(value=0)]):
                return dotted_name(left).rpartition(".")[2] == "rank"
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return dotted_name(operand).rpartition(".")[2] == "rank"
            case ast.Name() | ast.Attribute():
                name = dotted_name(node)
                last = name.rpartition(".")[2]
                return last in _NAMES or name in self._apart or name.endswith("job.worker")
            case ast.Call():
                return _find_called(node) in _FUNCTIONS
            case ast.Constant(value=str() as text):
                return text in _VARIABLES
        return False

    def _functions_of_one_worker(self) -> dict[str, str]:
        """Return functions that are called under such conditions only, with a condition of each."""
        found: dict[str, str] = {}
        for function in self._functions:
            names = {dotted_name(d).rpartition(".")[2] for d in function.decorator_list}
            if names & _DECORATORS:
                found[function.name] = f"@{min(names & _DECORATORS)}"
        for call in self._calls:
            if _find_called(call) == "on_step_end" and call.args:
                found[dotted_name(call.args[0]).rpartition(".")[2]] = "job.on_step_end calls it"
        every = {each.name for each in self._functions}
        while True:
            calls: dict[str, list[str]] = {}
            for name, condition in self._calls_by_condition(found):
                calls.setdefault(name, []).append(condition)
            new = {n: c[0] for n, c in calls.items() if n in every - set(found) and all(c)}
            if not new:
                return found
            found |= new

    def _calls_by_condition(self, alone: dict[str, str]) -> Iterator[tuple[str, str]]:
        """Yield the functions that are called, each with the condition at that place, or ""."""
        for scope in [self._module, *self._functions]:
            start = alone.get(getattr(scope, "name", ""), "")
            for call, condition in self._calls_within(scope.body, start):
                yield _find_called(call), condition

    def _calls_within(
        self, block: Sequence[ast.stmt], condition: str
    ) -> Iterator[tuple[ast.Call, str]]:
        for each, at, inner in self.blocks(block, condition):
            for part in _own_parts(each):
                yield from ((n, at) for n in ast.walk(part) if isinstance(n, ast.Call))
            for found, its in inner:
                yield from self._calls_within(found, its)


class _Body:
    """Reads code that runs again and again in its order, and collects the variables it keeps.

    `local`: names that end with each run. `tasks`: the loop over batches in it; with it
    variables that all workers set are collected.
    """

    def __init__(self, file: _File, local: set[str], tasks: ast.For | None = None) -> None:
        self.uses: dict[str, _Use] = {}
        self._file = file
        self._local = local
        self._known: set[str] = set()  # set before, in the same run
        self._tasks = tasks
        self._is_in_tasks = False
        self._is_over = False

    def read_after(self, block: Sequence[ast.stmt]) -> None:
        """Read the statements after a loop, which may use the collected variables."""
        self._is_over = True
        self.read_block(block, "")

    def read_block(self, block: Sequence[ast.stmt], condition: str) -> None:
        """Read statements; `condition`: the one under which they run, if it differs by worker."""
        for each, at, inner in self._file.blocks(block, condition):
            self._read_statement(each, at)
            self._is_in_tasks |= each is self._tasks
            self._read_inner(each, inner)
            self._is_in_tasks &= each is not self._tasks

    def _read_inner(self, statement: ast.stmt, inner: Sequence[tuple[list[ast.stmt], str]]) -> None:
        """Read inner blocks. What only one branch sets is not known to be set after it."""
        before, ends = set(self._known), []
        for block, condition in inner:
            self._known = set(before)
            self.read_block(block, condition)
            ends.append(self._known)
        self._known = before
        if ends and isinstance(statement, ast.With | ast.AsyncWith | ast.Try):
            self._known = ends[0]
        elif isinstance(statement, ast.If) and statement.orelse:
            self._known = ends[0] & ends[1]

    def _read_statement(self, node: ast.stmt, condition: str) -> None:
        match node:
            case ast.Assign(targets=targets, value=value):
                self._assign([t for each in targets for t in _parts(each)], value, condition)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._assign([target], value, condition)
            case ast.AugAssign(target=target, value=value):
                self._read(value, condition)
                self._set(target, condition, adds=True)
            case ast.For(target=target, iter=source):
                self._read(source, condition)
                self._known |= set(map(_key, _parts(target)))
            case ast.If(test=test) | ast.While(test=test):
                # A flag often means that a warning or a check was done once.
                decides = self._tasks is None or not (_key(_opposite(test)) or _key(test))
                self._read(test, condition, decides=decides)
            case _:
                for part in _own_parts(node):
                    self._read(part, condition)

    def _assign(self, targets: Sequence[ast.expr], value: ast.expr, condition: str) -> None:
        own = set(map(_key, targets))
        adds = any(_key(part) in own for part in ast.walk(value) if isinstance(part, ast.expr))
        self._read(value, condition, leaving_out=own)
        is_clock = any(dotted_name(part) in CLOCKS for part in ast.walk(value))
        for target in targets if not is_clock else ():
            self._set(target, condition, adds=adds)

    def _set(self, target: ast.expr, condition: str, *, adds: bool) -> None:
        key = _key(target)
        if not key and isinstance(target, ast.Subscript):
            # One of several items is set, and the rest stays.
            key, adds = _key(target.value), True
        if not key or self._is_over or _root(key) in self._local:
            return
        use = self.uses.setdefault(key, _Use())
        use.is_of_tasks |= self._is_in_tasks
        if not condition:
            use.is_common = True
        elif not use.line:
            use.line, use.condition = target.lineno, condition
        use.adds_up |= adds and key not in self._known
        if not adds:
            self._known.add(key)

    def _read(
        self,
        node: ast.AST,
        condition: str,
        *,
        decides: bool = False,
        leaving_out: Iterable[str] = (),
    ) -> None:
        """Read an expression; `decides`: something follows from its value."""
        match node:
            case ast.JoinedStr() | ast.Lambda():
                return
            case ast.Call(func=func, args=args):
                name = _find_called(node)
                if name in _SHOWING or name in _AGREEING:
                    return
                holder = func.value if isinstance(func, ast.Attribute) else None
                adds = name in _ADDING and _key(holder) in self._file.containers
                if holder is not None and adds:
                    self._set(holder, condition, adds=True)
                elif holder is not None:
                    self._read(holder, condition, decides=decides, leaving_out=leaving_out)
                for each in [*args, *(each.value for each in node.keywords)]:
                    self._read(each, condition, decides=not adds, leaving_out=leaving_out)
            case _:
                key = _key(node)
                if key and (decides or self._is_in_tasks) and key not in leaving_out:
                    use = self.uses.setdefault(key, _Use())
                    is_early = key not in self._known and not self._is_over
                    use.decides |= decides
                    use.decides_early |= decides and is_early
                    use.is_read_in_tasks |= self._is_in_tasks and is_early
                if isinstance(node, ast.Compare):
                    decides = not isinstance(node.ops[0], ast.Is | ast.IsNot)
                for part in ast.iter_child_nodes(node):
                    self._read(part, condition, decides=decides, leaving_out=leaving_out)


def _key(node: ast.AST | None) -> str:
    """Return a variable, an attribute or a constant item as it is written; "" for anything else."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        holder = _key(node.value)
        return f"{holder}[{node.slice.value!r}]" if holder else ""
    if isinstance(node, ast.Attribute):
        holder = _key(node.value)
        return f"{holder}.{node.attr}" if holder else ""
    return node.id if isinstance(node, ast.Name) else ""


def _root(key: str) -> str:
    """Return the variable through which an attribute or an item is reached."""
    return re.split(r"[.\[]", key)[0]


def _find_called(node: ast.AST) -> str:
    """Return the last part of the name of a called function; "" for anything else."""
    if not isinstance(node, ast.Call):
        return ""
    func = node.func
    return func.attr if isinstance(func, ast.Attribute) else dotted_name(func)


def _text(test: ast.expr) -> str:
    return ast.unparse(test)[:TEXT_CHARS_MAX]


def _opposite(test: ast.expr) -> ast.expr:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return test.operand
    return ast.UnaryOp(ast.Not(), test)


def _parts(target: ast.expr) -> list[ast.expr]:
    """Return the variables of a target that may be a tuple."""
    if isinstance(target, ast.Tuple | ast.List):
        return [part for each in target.elts for part in _parts(each)]
    return [target.value] if isinstance(target, ast.Starred) else [target]


def _inner_blocks(node: ast.stmt) -> list[list[ast.stmt]]:
    """Return the blocks of a compound statement, but not those of functions and classes."""
    if isinstance(node, (*_FUNCTION, ast.ClassDef)):
        return []
    found = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
    found += [each.body for each in getattr(node, "handlers", ())]
    found += [each.body for each in getattr(node, "cases", ())]
    return found if isinstance(node, ast.If) else [block for block in found if block]


def _own_parts(node: ast.stmt) -> Iterator[ast.AST]:
    """Yield the parts of a statement that are in none of its blocks."""
    if isinstance(node, (*_FUNCTION, ast.ClassDef)):
        return
    for part in ast.iter_child_nodes(node):
        if not isinstance(part, ast.stmt | ast.excepthandler | ast.match_case):
            yield part


def _local_names(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Return the variables that are set in a function, and end with it."""
    nodes = list(ast.walk(function))
    outer = {n for each in nodes if isinstance(each, ast.Global | ast.Nonlocal) for n in each.names}
    stored = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return stored - outer
