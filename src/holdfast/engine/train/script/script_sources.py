"""Finds in a script's source what differs between workers: clocks, addresses, a worker's number.

Generators that are not keyed are found as they change (script_memory.py). The result is a hint
for a person, never a verdict: a timer of a progress line does no harm.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from holdfast.engine.train.script.carried_variables import parse_file

SOURCES_MAX = 3  # the most that a message names
TEXT_CHARS_MAX = 40
_ALWAYS = frozenset(
    {"id", "hash", "job.worker", "job.is_leader", "os.getpid", "os.urandom", "socket.gethostname"}
    | {"uuid.uuid1", "uuid.uuid4", "os.getloadavg", "gc.get_objects", "gc.get_count", "os.environ"}
    | {"random.SystemRandom", "threading.get_ident", "datetime.now", "datetime.datetime.now"}
    | {"torch.seed", "torch.random.seed", "os.stat", "os.times"}
)
_MODULES = ("time", "secrets")  # all of whose functions are
_CALM = frozenset({"time.sleep", "time.strftime", "secrets.compare_digest"})
_FILES = "/proc/"


def find_sources(files: Sequence[str]) -> list[str]:
    """Return where these source files use such a thing, each with its line."""
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
                text = ast.unparse(calls.get(id(node), node))[:TEXT_CHARS_MAX]
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
