"""Lists the one-line bugs that can be planted in a module, and draws random ones.

It reads syntax trees and replaces bytes, so that a mutant is the very file with one place changed.
Code that only words a message, describes a type or checks an invariant is left alone: a mutant is a
mistake in what the code does.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mutants.rules import Change, Knowledge, changes_of

# Functions that word messages or check invariants; they make no decision.
UNTOUCHED_FUNCTIONS = ("__repr__", "__str__", "check", "check_view", "tell")
UNTOUCHED_CALLS = ("require", "assert_never", "NewType", "TypeVar", "attrgetter", "setting")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """Describes one planted bug: the bytes `start` to `end` of `path` become `text`.

    `before`, `after`: the changed lines, on one line, as reports and the list of equivalent mutants
    show them. `function`: its qualified name; empty outside of functions.
    """

    path: str
    function: str
    line: int
    rule: str
    before: str
    after: str
    start: int
    end: int
    text: str

    @property
    def name(self) -> str:
        """Return a name that no other mutant of the same code has."""
        return f"{self.path}:{self.line}:{self.start}-{self.end} {self.rule} {self.text}"

    def planted(self, source: bytes) -> bytes:
        """Return the source with this bug in it."""
        return source[: self.start] + self.text.encode() + source[self.end :]


@dataclass(slots=True)
class _Function:
    """Remembers the function around the place that is looked at."""

    name: str
    first_line: int
    node: ast.FunctionDef | None


class Planter:
    """Walks through one module and lists its mutants."""

    def __init__(self, path: str, source: bytes, knowledge: Knowledge) -> None:
        self._path = path
        self._source = source
        self._knowledge = knowledge
        starts = [0]
        for line in source.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        self._starts = starts
        self._found: list[Mutant] = []
        self.first_lines: dict[str, int] = {}  # first line of each function, by its qualified name

    def mutants(self) -> list[Mutant]:
        """Return all mutants of the module, in the order of their lines."""
        self._block(ast.parse(self._source).body, _Function("", 0, None), "")
        return sorted(self._found, key=lambda m: (m.line, m.start, m.rule, m.text))

    # ------------------------------------------------------------ walking

    def _block(self, body: Sequence[ast.stmt], function: _Function, scope: str) -> None:
        for index, statement in enumerate(body):
            if index == 0 and _is_text(statement):
                continue
            if isinstance(statement, ast.ClassDef):
                if not any("Protocol" in ast.unparse(base) for base in statement.bases):
                    name = f"{scope}{statement.name}"
                    self._block(statement.body, _Function("", 0, None), f"{name}.")
            elif isinstance(statement, ast.FunctionDef):
                self._function(statement, scope)
            else:
                self._statement(statement, function, scope, index)

    def _function(self, node: ast.FunctionDef, scope: str) -> None:
        if node.name in UNTOUCHED_FUNCTIONS:
            return
        name = f"{scope}{node.name}"
        first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
        self.first_lines[name] = first
        inside = _Function(name, first, node)
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self._expression(default, inside)
        self._block(node.body, inside, f"{name}.")

    def _statement(self, statement: ast.stmt, function: _Function, scope: str, index: int) -> None:
        if isinstance(statement, (ast.Import, ast.ImportFrom, ast.Assert, ast.Raise, ast.Global)):
            return
        if _calls(statement, UNTOUCHED_CALLS):
            return
        self._take(statement, function, index)
        for field, value in ast.iter_fields(statement):
            if field in ("annotation", "returns", "targets", "target", "type_comment", "pattern"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.expr):
                    self._expression(child, function)
                elif isinstance(child, ast.match_case):
                    if child.guard is not None:
                        self._expression(child.guard, function)
                    self._block(child.body, function, scope)
                elif isinstance(child, ast.withitem):
                    self._expression(child.context_expr, function)
                elif isinstance(child, ast.ExceptHandler):
                    self._block(child.body, function, scope)
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                self._block(value, function, scope)

    def _expression(self, node: ast.expr, function: _Function) -> None:
        if isinstance(node, ast.JoinedStr) or _calls(node, UNTOUCHED_CALLS):
            return
        self._take(node, function, 0)
        called = node.func if isinstance(node, ast.Call) else None
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Attribute) and child is called:
                self._expression(
                    child.value, function
                )  # a method of another name is missed at once
            elif isinstance(child, ast.expr):
                self._expression(child, function)
            elif isinstance(child, ast.keyword):
                self._expression(child.value, function)
            elif isinstance(child, ast.comprehension):
                for each in (child.iter, *child.ifs):
                    self._expression(each, function)

    # ------------------------------------------------------------ taking

    def _take(self, node: ast.stmt | ast.expr, function: _Function, index: int) -> None:
        for change in changes_of(node, self._text, self._knowledge, function.node, index):
            start = self._offset(change.start)
            end = self._offset(change.end)
            if self._source[start:end] != change.text.encode():
                found = self._mutant(function.name, node.lineno, change, start, end)
                self._found.append(found)

    def _mutant(self, function: str, line: int, change: Change, start: int, end: int) -> Mutant:
        first = self._starts[change.start[0] - 1]
        last = self._starts[change.end[0]]
        changed = self._source[first:start] + change.text.encode() + self._source[end:last]
        return Mutant(
            path=self._path,
            function=function,
            line=line,
            rule=change.rule,
            before=_one_line(self._source[first:last]),
            after=_one_line(changed),
            start=start,
            end=end,
            text=change.text,
        )

    def _text(self, node: ast.expr | ast.stmt) -> str:
        start = self._offset((node.lineno, node.col_offset))
        end = self._offset((node.end_lineno or 0, node.end_col_offset or 0))
        return self._source[start:end].decode()

    def _offset(self, place: tuple[int, int]) -> int:
        return self._starts[place[0] - 1] + place[1]


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _calls(node: ast.AST, names: Iterable[str]) -> bool:
    if isinstance(node, (ast.Expr, ast.Assign, ast.AnnAssign)) and node.value is not None:
        node = node.value
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


def _one_line(code: bytes) -> str:
    lines = [re.sub(r"(^|\s)# .*$", "", line) for line in code.decode().splitlines()]
    return " ".join(" ".join(lines).split())


# ---------------------------------------------------------------- drawing


def draw(
    mutants: Mapping[str, Sequence[Mutant]], sources: Mapping[str, bytes], seed: int, count: int
) -> list[Mutant]:
    """Draw `count` mutants, each of another line; on a line every rule is equally probable.

    Changes that give no valid program are left out.
    """
    rng = random.Random(seed)
    lines: dict[tuple[str, int], list[Mutant]] = {}
    for path in sorted(mutants):
        for mutant in mutants[path]:
            lines.setdefault((path, mutant.line), []).append(mutant)
    found: list[Mutant] = []
    for line in rng.sample(sorted(lines), len(lines)):
        if len(found) == count:
            break
        drawn = _draw_on(lines[line], sources[line[0]], rng)
        found += [drawn] if drawn is not None else []
    return found


def _draw_on(mutants: Sequence[Mutant], source: bytes, rng: random.Random) -> Mutant | None:
    left = list(mutants)
    while left:
        rule = rng.choice(sorted({mutant.rule for mutant in left}))
        mutant = rng.choice([mutant for mutant in left if mutant.rule == rule])
        try:
            compile(mutant.planted(source), mutant.path, "exec", dont_inherit=True)
        except SyntaxError:
            left.remove(mutant)
            continue
        return mutant
    return None
