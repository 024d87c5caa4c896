"""Knows the mistakes of people: comparisons, boundaries, signs, fields, order, omissions.

Each rule looks at one node of a syntax tree and yields the texts that could stand in its place.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

Place = tuple[int, int]  # line and column (bytes), as in the syntax tree
TextOf = Callable[[ast.expr | ast.stmt], str]

BOUNDARY = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
OPPOSITE = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}
OPPOSITE |= {"is": "is not", "is not": "is", "in": "not in", "not in": "in"}
COMPARISON = re.compile(r"<=|>=|==|!=|<|>|is\s+not|not\s+in|is|in")
ARITHMETIC = {"+": "-", "-": "+", "*": "//", "//": "*", "/": "*", "%": "//", "**": "*"}
ARITHMETIC |= {"<<": ">>", ">>": "<<", "&": "|", "^": "|"}
OPERATOR = re.compile(r"<<|>>|\*\*|//|[-+*/%&^]")
TWINS = {"min": "max", "max": "min", "any": "all", "all": "any"}
SMALL = 2  # whole numbers up to this count something; greater ones are settings


@dataclass(frozen=True, slots=True)
class Change:
    """Replaces the text between two places with another text."""

    rule: str
    start: Place
    end: Place
    text: str


@dataclass(slots=True)
class Knowledge:
    """Knows the fields of classes by their types, and the members of enumerations."""

    fields: dict[str, dict[str, str]] = field(default_factory=dict)  # class, field: type
    enums: dict[str, list[str]] = field(default_factory=dict)

    def learn(self, source: bytes) -> None:
        """Take in the classes of one module."""
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.ClassDef):
                continue
            if any("Enum" in ast.unparse(base) for base in node.bases):
                names = [s.targets[0] for s in node.body if isinstance(s, ast.Assign)]
                self.enums[node.name] = [n.id for n in names if isinstance(n, ast.Name)]
                continue
            kinds = self.fields.setdefault(node.name, {})
            for each in node.body:
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                    kinds[each.target.id] = ast.unparse(each.annotation)
                elif isinstance(each, ast.FunctionDef) and each.returns is not None:
                    if any(ast.unparse(d) == "property" for d in each.decorator_list):
                        kinds[each.name] = ast.unparse(each.returns)

    def siblings(self, name: str) -> list[str]:
        """Return the fields that appear next to this one in any class, and have its type."""
        beside = [
            {other for other, kind in kinds.items() if kind == kinds[name]}
            for kinds in self.fields.values()
            if name in kinds
        ]
        return sorted(set.intersection(*beside) - {name}) if beside else []


def changes_of(
    node: ast.stmt | ast.expr,
    text_of: TextOf,
    knowledge: Knowledge,
    function: ast.FunctionDef | None,
    index: int,
) -> Iterator[Change]:
    """Yield the changes of one node. `index`: the place of a statement in its block."""
    if isinstance(node, ast.stmt):
        yield from _statement(node, text_of, function, index)
        tests = [node.test] if isinstance(node, (ast.If, ast.While)) else []
        forever = isinstance(node, ast.While)
    else:
        yield from _operators(node, text_of)
        yield from _operands(node, text_of, knowledge, function)
        tests = [node.test] if isinstance(node, ast.IfExp) else []
        forever = False
        for comprehension in getattr(node, "generators", []):
            tests += comprehension.ifs
    for test in tests:
        if isinstance(test, ast.Constant):
            continue
        yield _replace("condition negated", test, f"(not ({text_of(test)}))")
        yield _replace("condition constant", test, "False")
        if not forever:
            yield _replace("condition constant", test, "True")


def _replace(rule: str, node: ast.expr | ast.stmt, text: str) -> Change:
    end = (node.end_lineno or node.lineno, node.end_col_offset or node.col_offset)
    return Change(rule, (node.lineno, node.col_offset), end, text)


def _begin(node: ast.expr) -> Place:
    return node.lineno, node.col_offset


def _end(node: ast.expr) -> Place:
    return node.end_lineno or node.lineno, node.end_col_offset or node.col_offset


# ---------------------------------------------------------------- operators


def _operators(node: ast.expr, text_of: TextOf) -> Iterator[Change]:
    match node:
        case ast.Compare(left, ops, comparators):
            for a, op, b in zip([left, *comparators], ops, comparators, strict=False):
                sign = SIGNS[type(op)]
                for rule, table in (("boundary", BOUNDARY), ("comparison", OPPOSITE)):
                    if sign in table:
                        yield from _gap(rule, node, (a, b), (COMPARISON, table[sign]), text_of)
        case ast.BoolOp(op, values):
            word, other = ("and", "or") if isinstance(op, ast.And) else ("or", "and")
            for a, b in itertools.pairwise(values):
                yield from _gap("and/or", node, (a, b), (re.compile(word), other), text_of)
            for left_out in values:
                kept = [f"({text_of(v)})" for v in values if v is not left_out]
                yield _replace("operand dropped", node, f"({f' {word} '.join(kept)})")
        case ast.UnaryOp(ast.Not(), operand):
            yield _replace("not dropped", node, f"({text_of(operand)})")
        case ast.BinOp(left, op, right):
            if isinstance(op, ast.Add) and (_is_list(left) or _is_list(right)):
                yield _replace("operand dropped", node, text_of(left))
                yield _replace("operand dropped", node, text_of(right))
            elif not isinstance(op, ast.BitOr):
                sign = SIGNS[type(op)]
                change = (OPERATOR, ARITHMETIC[sign])
                yield from _gap("arithmetic", node, (left, right), change, text_of)


def _is_list(node: ast.expr) -> bool:
    return isinstance(node, (ast.List, ast.ListComp, ast.Tuple))


SIGNS: dict[type, str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Is: "is",
    ast.IsNot: "is not",
    ast.In: "in",
    ast.NotIn: "not in",
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Pow: "**",
    ast.LShift: "<<",
    ast.RShift: ">>",
    ast.BitAnd: "&",
    ast.BitXor: "^",
    ast.MatMult: "*",
}


def _gap(
    rule: str,
    node: ast.expr,
    sides: tuple[ast.expr, ast.expr],
    change: tuple[re.Pattern[str], str],
    text_of: TextOf,
) -> Iterator[Change]:
    """Change the operator before the right operand, on the line on which that operand begins."""
    left, right = sides
    pattern, new = change
    row, begin = right.lineno, right.col_offset
    line = text_of(node).splitlines()[row - node.lineno]
    cut = node.col_offset if row == node.lineno else 0  # where the line is this node's
    after = (left.end_col_offset or 0) - cut if left.end_lineno == row else 0
    hits = list(pattern.finditer(line[: begin - cut], after))
    if hits:  # none if the operator is on the line before; the formatter never puts it there
        yield Change(rule, (row, hits[-1].start() + cut), (row, hits[-1].end() + cut), new)


# ---------------------------------------------------------------- operands


def _operands(
    node: ast.expr, text_of: TextOf, knowledge: Knowledge, function: ast.FunctionDef | None
) -> Iterator[Change]:
    match node:
        case ast.Constant(value):
            for text in _numbers(value, in_function=function is not None):
                yield _replace("constant", node, text)
        case ast.Call(func, args, keywords):
            if isinstance(func, ast.Name) and func.id in TWINS:
                yield _replace("min/max, any/all", func, TWINS[func.id])
            symmetric = isinstance(func, ast.Name) and func.id in TWINS
            for a, b in () if symmetric else itertools.pairwise(args):
                if not isinstance(a, ast.Starred) and not isinstance(b, ast.Starred):
                    yield from _swap("arguments swapped", a, b, text_of)
            yield from _swap_keywords(func, keywords, text_of, knowledge)
        case ast.Subscript(_, index):
            yield from _index(index, text_of)
        case ast.Attribute(owner, name, ast.Load()):
            if isinstance(owner, ast.Name) and name in knowledge.enums.get(owner.id, []):
                others = [each for each in knowledge.enums[owner.id] if each != name]
            elif isinstance(owner, ast.Name) and owner.id == "self":
                others = []  # the other attributes of the object are not known
            else:
                others = knowledge.siblings(name)
            for other in others:
                yield _replace("sibling field", node, f"{text_of(owner)}.{other}")
        case ast.Name(name, ast.Load()) if function is not None:
            for other in _like(name, function):
                yield _replace("sibling name", node, other)
        case ast.List(elements, ast.Load()) | ast.Tuple(elements, ast.Load()) if function:
            for a, b in itertools.pairwise(elements):
                yield from _swap("order", a, b, text_of)
            for left_out in elements if isinstance(node, ast.List) else ():
                kept = [text_of(each) for each in elements if each is not left_out]
                yield _replace("element dropped", node, f"[{', '.join(kept)}]")


def _numbers(value: object, *, in_function: bool) -> list[str]:
    """Return other numbers: in code one more or less; for a setting, one far from its value."""
    if isinstance(value, bool):
        return [str(not value)]
    if isinstance(value, int):
        if in_function or value <= SMALL:
            return [str(value + 1), *([str(value - 1)] if value else [])]
        return [str(value * 10), str(value // 10)]
    if isinstance(value, float):
        factor = 2 if in_function else 10
        return [repr(value * factor), repr(value / factor)] if value else ["1.0"]
    return []


def _swap(rule: str, a: ast.expr, b: ast.expr, text_of: TextOf) -> Iterator[Change]:
    one, two = text_of(a), text_of(b)
    if one != two:
        yield Change(rule, _begin(a), _end(b), f"{two}, {one}")


def _swap_keywords(
    func: ast.expr, keywords: list[ast.keyword], text_of: TextOf, knowledge: Knowledge
) -> Iterator[Change]:
    kinds = knowledge.fields.get(func.id, {}) if isinstance(func, ast.Name) else {}
    for i, one in enumerate(keywords):
        for two in keywords[i + 1 :]:
            if one.arg is None or two.arg is None or kinds.get(one.arg) is None:
                continue
            if kinds[one.arg] == kinds.get(two.arg) and text_of(one.value) != text_of(two.value):
                yield _replace("arguments swapped", one.value, text_of(two.value))


def _index(index: ast.expr, text_of: TextOf) -> Iterator[Change]:
    match index:
        case ast.Constant(0):
            yield _replace("first/last", index, "-1")
        case ast.UnaryOp(ast.USub(), ast.Constant(1)):
            yield _replace("first/last", index, "0")
        case ast.Slice(None, ast.expr() as upper, None):
            yield _replace("first/last", index, f"{text_of(upper)}:")
        case ast.Slice(ast.expr() as lower, None, None):
            yield _replace("first/last", index, f":{text_of(lower)}")


def _like(name: str, function: ast.FunctionDef) -> Iterator[str]:
    """Yield the parameters that have the type of this one."""
    arguments = (*function.args.args, *function.args.kwonlyargs)
    kinds = {a.arg: ast.unparse(a.annotation) for a in arguments if a.annotation is not None}
    if name in kinds:
        yield from (other for other in kinds if other != name and kinds[other] == kinds[name])


# ---------------------------------------------------------------- statements


def _statement(
    node: ast.stmt, text_of: TextOf, function: ast.FunctionDef | None, index: int
) -> Iterator[Change]:
    if function is None:
        return
    makes = function.name == "__init__"  # an attribute that is left out there is missed at once
    match node:
        case ast.Expr(ast.Call()) | ast.Expr(ast.Yield() | ast.YieldFrom()) if not makes:
            yield _replace("statement dropped", node, "pass")
        case ast.Assign([ast.Attribute() | ast.Subscript() | ast.Tuple()]) if not makes:
            yield _replace("statement dropped", node, "pass")
        case ast.Delete() | ast.Break() | ast.Continue():
            yield _replace("statement dropped", node, "pass")
        case ast.AugAssign(target, op, value):
            yield _replace("statement dropped", node, "pass")
            yield _replace("= for +=", node, f"{ast.unparse(target)} = {text_of(value)}")
            sign = {ast.Add: "-=", ast.Sub: "+="}.get(type(op))
            if sign and not _is_list(value):
                text = f"{ast.unparse(target)} {sign} {text_of(value)}"
                yield _replace("arithmetic", node, text)
        case ast.Return(ast.expr() as value):
            for text in _other_results(text_of(value), function.returns):
                yield _replace("result", value, text)
    returns = "" if function.returns is None else ast.unparse(function.returns)
    if returns == "None" and index and not makes and not isinstance(node, ast.Return):
        begin = (node.lineno, node.col_offset)
        yield Change("early return", begin, begin, f"return\n{' ' * node.col_offset}")


def _other_results(value: str, returns: ast.expr | None) -> Iterator[str]:
    kind = "" if returns is None else ast.unparse(returns)
    if kind == "bool":
        yield f"not ({value})"
    elif kind.startswith(("list[", "Sequence[")) and value != "[]":
        yield "[]"
    elif kind.startswith("tuple[") and kind.endswith(", ...]") and value != "()":
        yield "()"
    elif kind.endswith("| None") and value != "None":
        yield "None"
