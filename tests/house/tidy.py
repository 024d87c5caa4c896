"""The mechanical house rules that test_tidy.py enforces, each with its reason.

A rule reads syntax trees and never runs the code it judges. Where a rule's reason does not apply,
it is broken in the open: `# tidy: allow RULE because ...` on the line that is reported.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import tidy_docstrings
import tidy_layers
import tidy_names
import tidy_prose
import tidy_sets
import tidy_sizes
from tidy_modules import (
    LABS,
    Finding,
    Module,
    in_house,
    in_src,
    parameters,
    parse,
)
from tidy_sets import Function

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("src", "tests", "examples", "benchmarks")

TORCH_USERS = ("engine.train", "engine.faults", "tables", "trainers", "reports", "lab")
ROOMS = (*tidy_layers.PRODUCTS, *tidy_layers.ROOTS, tidy_layers.ENGINE)

# Where execution can start; every other module must be reachable from one of these.
ENTRY_POINTS = (
    "holdfast",
    "holdfast.__main__",
    "holdfast.cli.main",
    "holdfast.trainers.accelerate",
    "holdfast.trainers.lightning",
    "holdfast.reports.lightning_loggers",
    "holdfast.reports.otel",
    "holdfast.reports.trackers",
    "holdfast.trainers.transformers",
    "holdfast.engine.fleet.fleet_process",
    "holdfast.plan.network",
    "holdfast.engine.train.checkpoint.dcp",
    "holdfast.engine.faults.disturbed",
    "holdfast.lab.check.traced",
)

IMPURE = frozenset(
    "_thread asyncio concurrent datetime multiprocessing os pathlib queue random secrets select "
    "selectors signal socket ssl subprocess tempfile threading time uuid".split()
)
IMPURE_CALLS = frozenset({"hash", "id", "input", "open", "print"})
CODE_LOADERS = frozenset("_pickle cloudpickle dill joblib marshal pickle shelve".split())
PICKLING_COLLECTIVES = frozenset(
    "all_gather_object broadcast_object_list gather_object recv_object_list scatter_object_list "
    "send_object_list".split()
)
NEWER_THAN_310 = {
    "typing": "LiteralString Never NotRequired Required Self TypeVarTuple Unpack assert_never "
    "assert_type dataclass_transform override reveal_type".split(),
    "enum": "EnumCheck ReprEnum StrEnum verify".split(),
    "asyncio": "Barrier Runner TaskGroup timeout timeout_at".split(),
    "datetime": ["UTC"],
    "contextlib": ["chdir"],
}


@dataclass(frozen=True)
class Rule:
    """Is one rule. `find` sees all modules at once, since some rules are about connections."""

    name: str
    find: Callable[[list[Module]], Iterator[Finding]]
    why: str


def imports(module: Module) -> Iterator[tuple[int, str]]:
    """Yield every dotted name the file imports, at any depth; `from a import b` gives a and a.b."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.name.split(".")
                keep = len(parts) - node.level + module.path.endswith("/__init__.py")
                base = ".".join([*parts[:keep], *([base] if base else [])])
            if base != "holdfast":  # in `from holdfast import plan` only holdfast.plan matters
                yield node.lineno, base
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def calls(module: Module) -> Iterator[tuple[ast.Call, str]]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call):
            yield node, tidy_sets.called(node)


def in_core(modules: list[Module]) -> Iterator[Module]:
    return (m for m in modules if tidy_layers.find_room(m.name) in tidy_layers.PURE)


# ---------------------------------------------------------------- layers and imports


def find_layers(modules: list[Module]) -> Iterator[Finding]:
    names = {m.name for m in in_src(modules)}
    for module in in_src(modules):
        room = tidy_layers.find_room(module.name)
        for line, name in imports(module):
            parts = name.split(".")
            if parts[0] != "holdfast":
                continue
            # `from holdfast import join` imports a name of holdfast itself.
            is_name = len(parts) == 2 and name not in names and parts[1] not in ROOMS
            imported = "" if is_name else tidy_layers.find_room(name)
            if refused := tidy_layers.import_refused(room, imported):
                yield Finding(module, line, f"imports {name}: {refused}")


def find_two_way_pairs(modules: list[Module]) -> Iterator[Finding]:
    """Find packages that import each other."""
    names = {m.name: m for m in in_src(modules)}
    packages = {name for name, m in names.items() if m.path.endswith("/__init__.py")}
    seen: dict[tuple[str, str], tuple[Module, int]] = {}
    for module in in_src(modules):
        above = module.name if module.name in packages else parent(module.name)
        for line, name in imports(module):
            owner = name if name in names else parent(name)
            below = owner if owner in packages else parent(owner)
            if below.startswith("holdfast.") and below != above:
                seen.setdefault((above, below), (module, line))
    for (above, below), (module, line) in seen.items():
        if (below, above) in seen and above < below:
            other = seen[below, above][0].path
            yield Finding(module, line, f"{above} and {below} import each other (see {other})")


def parent(name: str) -> str:
    return name.rpartition(".")[0]


def find_train_layers(modules: list[Module]) -> Iterator[Finding]:
    train = "holdfast.engine.train."
    for module in modules:
        if not module.name.startswith(train):
            continue
        importer = module.name.removeprefix(train)
        for line, name in imports(module):
            imported = name.removeprefix(train)
            if imported != name and (why := tidy_layers.train_import_refused(importer, imported)):
                yield Finding(module, line, f"imports {name}: {why}")


def find_torch(modules: list[Module]) -> Iterator[Finding]:
    for module in in_src(modules):
        if tidy_layers.find_room(module.name) not in TORCH_USERS:
            for line, name in imports(module):
                if name.startswith("torch"):
                    yield Finding(module, line, f"imports {name}")


def find_impure_core(modules: list[Module]) -> Iterator[Finding]:
    for module in in_core(modules):
        for line, name in imports(module):
            top = name.split(".")[0]
            if top in IMPURE:
                yield Finding(module, line, f"imports {name}")
            elif top != "holdfast" and top not in sys.stdlib_module_names:
                yield Finding(module, line, f"imports {name}, which is not in the standard library")
        for call, name in calls(module):
            if name in IMPURE_CALLS:
                yield Finding(module, call.lineno, f"calls {name}()")


def find_code_from_data(modules: list[Module]) -> Iterator[Finding]:
    for module in in_src(modules):
        for line, name in imports(module):
            if name.split(".")[0] in CODE_LOADERS or name == "torch.load":
                yield Finding(module, line, f"imports {name}")
        for node, name in calls(module):
            true = {k.arg for k in node.keywords if ast.unparse(k.value) == "True"}
            if name in ("eval", "exec"):
                yield Finding(module, node.lineno, f"calls {name}()")
            elif name == "torch.load" and "weights_only" not in true:
                yield Finding(module, node.lineno, "calls torch.load without weights_only=True")
            elif "allow_pickle" in true:
                yield Finding(module, node.lineno, f"calls {name} with allow_pickle=True")
            elif name.split(".")[-1] in PICKLING_COLLECTIVES:
                yield Finding(module, node.lineno, f"calls {name}, which unpickles what peers send")


def find_newer_python(modules: list[Module]) -> Iterator[Finding]:
    new = {f"{module}.{name}" for module, names in NEWER_THAN_310.items() for name in names}
    for module in modules:
        for line, name in imports(module):
            if name in new or name == "tomllib":
                yield Finding(module, line, f"imports {name}, which Python 3.10 lacks")
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in new:
                yield Finding(module, node.lineno, f"{ast.unparse(node)} is missing in Python 3.10")


# ---------------------------------------------------------------- names, docstrings, use


def find_unitless_times(modules: list[Module]) -> Iterator[Finding]:
    unitless = re.compile(r"(^|_)(timeouts?|intervals?|delays?)(_(min|max|default|initial))?$")
    for module in in_house(modules):
        named: list[tuple[int, str, ast.expr | None]] = []
        for node in ast.walk(module.tree):
            if isinstance(node, Function):
                named += [(p.lineno, p.arg, p.annotation) for p in parameters(node)]
            elif isinstance(node, ast.ClassDef):  # the fields of dataclasses are parameters too
                named += [
                    (s.lineno, s.target.id, s.annotation)
                    for s in node.body
                    if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)
                ]
        for line, name, annotation in named:
            typed = ast.unparse(annotation) if annotation else ""
            if unitless.search(name) and "timedelta" not in typed:
                yield Finding(module, line, f"`{name}` has no unit: seconds are named `{name}_s`")


def find_missing_module_docstrings(modules: list[Module]) -> Iterator[Finding]:
    for module in in_house(modules):
        if not ast.get_docstring(module.tree):
            yield Finding(module, 1, "has no docstring")


def find_docstring_riddles(modules: list[Module]) -> Iterator[Finding]:
    errors = {"HoldfastError"}
    classes = [
        n for m in in_house(modules) for n in ast.walk(m.tree) if isinstance(n, ast.ClassDef)
    ]
    for _ in range(3):  # the tree of exceptions is no deeper
        errors |= {c.name for c in classes if errors & {ast.unparse(b) for b in c.bases}}
    for module in in_house(modules):
        for line, name, text in tidy_docstrings.docstrings(module.tree):
            if why := tidy_docstrings.riddle(text, frozenset(errors)):
                yield Finding(module, line, f"the docstring of {name}: {why}")


def find_dialect(modules: list[Module]) -> Iterator[Finding]:
    baseline = tidy_prose.read_baseline()
    for module in modules:
        if why := tidy_prose.judge(module.path, module.source, baseline):
            yield Finding(module, 1, why)


def find_names_used_twice(modules: list[Module]) -> Iterator[Finding]:
    seen: dict[str, str] = {}
    for module in in_house(modules):
        names = [(n.lineno, n.name) for n in ast.walk(module.tree) if isinstance(n, ast.ClassDef)]
        found = [(line, name) for line, name in names if name[0] != "_"]
        base = module.path.rpartition("/")[2]
        if base != "__init__.py":
            found.append((1, base))
        for line, name in found:
            if name in seen:
                yield Finding(module, line, f"`{name}` is also in {seen[name]}")
            seen.setdefault(name, module.path)


def definition(modules: dict[str, Module], module: str, name: str) -> tuple[Module, ast.AST] | None:
    """Where `name`, as seen from `module`, is defined: follows `from x import name` through src."""
    if module not in modules:
        return None
    for node in ast.walk(modules[module].tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name and node.module.startswith("holdfast"):
                    inner = modules.get(f"{node.module}.{alias.name}")
                    if inner is not None:
                        return inner, inner.tree
                    return definition(modules, node.module, alias.name)
    for node in modules[module].tree.body:
        if isinstance(node, Function | ast.ClassDef):
            if node.name == name:
                return modules[module], node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(t, ast.Name) and t.id == name for t in targets):
                return modules[module], node
    return None


def exported(module: Module) -> Iterator[tuple[int, str]]:
    for node in module.tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            for element in ast.walk(node.value):
                if isinstance(element, ast.Constant) and isinstance(element.value, str):
                    yield element.lineno, element.value


def find_undocumented_api(modules: list[Module]) -> Iterator[Finding]:
    by_name = {m.name: m for m in in_src(modules)}
    root = by_name.get("holdfast")
    if root is None:
        return
    names = list(exported(root))
    if root.tree.body and not names:
        yield Finding(root, 1, "has no __all__ written out as a list of strings")
    for line, name in names:
        found = definition(by_name, "holdfast", name)
        if found is None:
            if f"holdfast.{name}" not in by_name:
                what = f"`{name}` is in __all__, but no import or definition tells where it is"
                yield Finding(root, line, f"{what} (one under TYPE_CHECKING will do)")
            continue
        where, node = found
        members = node.body if isinstance(node, ast.ClassDef) else []
        public = [m for m in members if isinstance(m, Function) and m.name[0] != "_"]
        for item in [node, *public]:
            if isinstance(item, Function | ast.ClassDef) and not ast.get_docstring(item):
                title = name if item is node else f"{name}.{item.name}"
                yield Finding(where, item.lineno, f"`{title}` is public and has no docstring")


def uses(module: Module, known: dict[str, Module]) -> Iterator[str]:
    """Yield the modules this one needs: imported, or named in a string as in `python -m NAME`."""
    for _, name in imports(module):
        yield name
    texts, frames = [], [("", "")]  # around a word of the file, as in f"holdfast.x.{...}_y"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value.partition(":")[0])
        elif isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
            last = node.values[-1]
            after = str(last.value) if isinstance(last, ast.Constant) and node.values[1:] else ""
            frames.append((str(node.values[0].value), after))
    for before, after in frames:
        yield from (before + t + after for t in texts if before + t + after in known)


def has_plugin(module: Module) -> bool:
    """Return whether this is a product, which the engine finds by the names of folders."""
    assigned = [node for node in module.tree.body if isinstance(node, ast.Assign)]
    return any(ast.unparse(target) == "PLUGIN" for node in assigned for target in node.targets)


def find_unused_modules(modules: list[Module]) -> Iterator[Finding]:
    known = {m.name: m for m in in_src(modules)}
    roots = [known[n] for n in ENTRY_POINTS if n in known]
    # The test kit is shipped for others' tests; ours are its first users.
    outside = [m for m in modules if not m.path.startswith("src/")]
    roots += [known[n] for m in outside for n in uses(m, known) if n in known]
    contracts = "holdfast.lab.contracts."
    roots = [m for m in roots if m.name.startswith(contracts) or m.name in ENTRY_POINTS]
    roots += [m for m in known.values() if has_plugin(m)]
    reached = {m.name for m in roots}
    while roots:
        module = roots.pop()
        for name in uses(module, known):
            if name in known and name not in reached:
                reached.add(name)
                roots.append(known[name])
    for name, module in known.items():
        if name not in reached and not module.path.endswith("/__init__.py"):
            yield Finding(module, 1, f"no entry point reaches {name}")


# ---------------------------------------------------------------- determinism


def find_sleeping_tests(modules: list[Module]) -> Iterator[Finding]:
    for module in modules:
        # A slow job under test must be slow, and the laboratories poll for conditions.
        is_excused = module.path.startswith(("tests/scripts/", LABS))
        if module.path.startswith("tests/") and not is_excused:
            for line, name in imports(module):
                if name == "time.sleep":
                    yield Finding(module, line, "imports time.sleep")
            for call, name in calls(module):
                if name == "time.sleep":
                    yield Finding(module, call.lineno, "calls time.sleep")


def find_set_iteration(modules: list[Module]) -> Iterator[Finding]:
    for module in in_core(modules):
        for line, text in tidy_sets.orders_followed(module.tree):
            yield Finding(module, line, f"follows the order of the set `{text}`")


# ---------------------------------------------------------------- all of them

RULES = [
    Rule(
        "layers",
        find_layers,
        "products import the engine, and not each other; in the engine imports go one way "
        "(commands -> faults -> fleet -> runtime -> train -> host, records -> state -> net -> "
        "wire -> core), so that what is simulated is the product and each part can be understood "
        "without those above it (tests/house/tidy_layers.py)",
    ),
    Rule(
        "no-two-way",
        find_two_way_pairs,
        "of two packages one can be read without the other",
    ),
    Rule(
        "train-layers",
        find_train_layers,
        "inside train as well imports go one way (script -> state, shards -> step, data -> "
        "checkpoint -> exchange); the root is the public API and the place where all is put "
        "together (tests/house/tidy_layers.py)",
    ),
    Rule(
        "torch-only-in-train",
        find_torch,
        "agents, coordinator and simulator must start fast and run where torch is not installed; "
        "only the training process needs it",
    ),
    Rule(
        "pure-core",
        find_impure_core,
        "the core decides and never acts: time, randomness and ids are arguments, or the simulator "
        "could not replay it from a seed",
    ),
    Rule(
        "no-code-from-data",
        find_code_from_data,
        "bytes from a peer or a disk must never become code",
    ),
    Rule(
        "python-3.10",
        find_newer_python,
        "pyproject.toml promises Python 3.10; core/errors.py is the place for small stand-ins",
    ),
    Rule(
        "function-size",
        tidy_sizes.find_long_functions,
        f"a function fits on a screen: at most {tidy_sizes.FUNCTION_LINES_MAX} lines, branches in "
        "the parent and pure leaves",
    ),
    Rule(
        "file-size",
        tidy_sizes.find_long_files,
        f"a file is about one thing: at most {tidy_sizes.FILE_LINES_MAX} lines",
    ),
    Rule(
        "line-size",
        tidy_sizes.find_long_lines,
        f"two versions fit side by side: at most {tidy_sizes.LINE_COLUMNS_MAX} columns",
    ),
    Rule(
        "constructor-size",
        tidy_sizes.find_wide_constructors,
        f"more than {tidy_sizes.CONSTRUCTOR_PARAMETERS_MAX} parameters are several objects in one, "
        "or want a policy record",
    ),
    Rule(
        "class-size",
        tidy_sizes.find_large_classes,
        f"more than {tidy_sizes.METHODS_MAX} methods or {tidy_sizes.ATTRIBUTES_MAX} attributes are "
        "several concepts in one class",
    ),
    Rule(
        "short-file",
        tidy_sizes.find_short_files,
        f"a file of less than {tidy_sizes.SHORT_FILE_LINES} lines belongs to what uses it",
    ),
    Rule(
        "module-docstring",
        find_missing_module_docstrings,
        "a module says what it is for, what it must not know and which invariant it keeps",
    ),
    Rule(
        "docstring-sentence",
        find_docstring_riddles,
        "a docstring begins with a whole sentence that says what the thing does or is: readers "
        "come from anywhere and have not read the neighbours",
    ),
    Rule(
        "plain-prose",
        find_dialect,
        "readers of any origin read comments and docstrings: plain sentences with a subject, a "
        "verb and an object (tests/house/tidy_prose.py has the phrases, and what to write instead)",
    ),
    Rule(
        "unique-name",
        find_names_used_twice,
        "a public class and a module are found, and talked of, by their name alone",
    ),
    Rule(
        "verb-in-name",
        tidy_names.find_bare_names,
        "a call is understood where it stands: `record_commit(step)`, not `committed(step)`",
    ),
    Rule(
        "public-docstring",
        find_undocumented_api,
        "what users call says its shapes, units and errors",
    ),
    Rule(
        "unused-module",
        find_unused_modules,
        "code that nothing reaches is not tested by use and misleads readers: wire it in, delete "
        "it, or name it in ENTRY_POINTS (tests/house/tidy.py)",
    ),
    Rule(
        "unit-in-name",
        find_unitless_times,
        "a time-out in the wrong unit looks like a hang: times are seconds, named ..._s",
    ),
    Rule(
        "no-sleep-in-tests",
        find_sleeping_tests,
        "a fixed pause is too long on a fast machine and too short on a busy one: wait for the "
        "condition, or pass the time in",
    ),
    Rule(
        "no-set-order",
        find_set_iteration,
        "set order changes with the hash seed, so traces would too: use sorted(...), or a tuple, "
        "list or dict from the start",
    ),
]


def broken(rule: Rule, modules: list[Module]) -> list[str]:
    """Return the places that break `rule`, one line each, except where the source says why."""
    found: dict[tuple[str, int], str] = {}
    for f in rule.find(modules):
        lines = f.module.source.splitlines()
        text = lines[f.line - 1] if f.line <= len(lines) else ""
        if f"tidy: allow {rule.name} because " not in text:
            found.setdefault((f.module.path, f.line), f.what)
    return [f"{path}:{line}: {what}" for (path, line), what in sorted(found.items())]


def repository() -> list[Module]:
    paths = [p for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*.py"))]
    return [parse(p.relative_to(ROOT).as_posix(), p.read_text(encoding="utf-8")) for p in paths]
