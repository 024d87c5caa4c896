"""Where code would follow the order of a set, as far as its text tells: no types are inferred.

A part of tidy.py; knows syntax trees only.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

ORDER_FOLLOWERS = frozenset("dict.fromkeys enumerate filter iter list map tuple zip".split())
Function = ast.FunctionDef | ast.AsyncFunctionDef


def called(node: ast.AST) -> str:
    """`a.b.c` for a call written a.b.c(...), "" for anything else."""
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def typed_as_set(annotation: ast.AST | None) -> bool:
    text = ast.unparse(annotation) if annotation else ""
    return re.match(r"(typing\.|t\.)?(set|frozenset|Set|AbstractSet|FrozenSet)\b", text) is not None


def set_key(node: ast.AST) -> str:
    """One key for a plain name, another for an attribute, whoever's it is; "" for the rest."""
    if isinstance(node, ast.Name):
        return node.id
    return f".{node.attr}" if isinstance(node, ast.Attribute) else ""


class SetNames:
    """Which names and attributes hold sets, as far as the text of some nodes tells.

    Untyped ones count only if every value they are given is a set: `xs = sorted(xs)` clears xs.
    """

    def __init__(self, nodes: list[ast.AST], fields: bool = False) -> None:
        self.given: dict[str, list[ast.expr]] = {}
        self.typed: set[str] = set()
        for node in nodes:
            if isinstance(node, ast.arg) and typed_as_set(node.annotation):
                self.typed.add(node.arg)
            elif isinstance(node, ast.AnnAssign) and typed_as_set(node.annotation):
                self.typed.add(set_key(node.target))
                if fields:
                    self.typed.add("." + set_key(node.target).lstrip("."))
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    self.given.setdefault(set_key(target), []).append(node.value)

    def is_set(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Set | ast.SetComp):
            return True
        if isinstance(node, ast.Call):
            how = called(node).rpartition(".")[2]
            return called(node) in ("set", "frozenset") or (
                how in ("union", "intersection", "difference", "symmetric_difference")
            )
        if isinstance(node, ast.BinOp):
            sides = (node.left, node.right)
            return isinstance(node.op, ast.BitOr | ast.BitAnd | ast.Sub | ast.BitXor) and any(
                called(side).endswith(".keys") or self.is_set(side) for side in sides
            )
        key = set_key(node)
        given = self.given.pop(key, [])  # popped meanwhile: a name may be given itself
        found = key in self.typed or (bool(given) and all(self.is_set(v) for v in given))
        if given:
            self.given[key] = given
        return bool(key) and found


def iterated(node: ast.AST) -> Iterator[ast.expr]:
    """The expressions whose order this node would follow."""
    if isinstance(node, ast.For | ast.comprehension):
        yield node.iter
    elif isinstance(node, ast.Starred):
        yield node.value
    elif isinstance(node, ast.Call):
        name = called(node)
        if name in ORDER_FOLLOWERS or name.endswith(".join"):
            yield from node.args
        elif name.endswith(".pop") and not node.args and isinstance(node.func, ast.Attribute):
            yield node.func.value


def orders_followed(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of every expression that is a set and whose order decides something."""
    everywhere = list(ast.walk(tree))
    fields = SetNames(everywhere, fields=True)
    scopes = [list(ast.walk(n)) for n in everywhere if isinstance(n, Function)]
    inside = {id(n) for scope in scopes for n in scope}
    scopes.append([n for n in everywhere if id(n) not in inside])
    for scope in scopes:
        names = SetNames(scope)
        names.typed |= {t for t in fields.typed if t.startswith(".")}
        names.given |= {k: v for k, v in fields.given.items() if k.startswith(".")}
        for node in scope:
            for expression in iterated(node):
                if names.is_set(expression):
                    yield expression.lineno, ast.unparse(expression)
