"""Counts the lines that bring each script of examples/ports to Holdfast, and to plain DDP.

    python tests/kits/port_counts.py     prints the table of docs/porting.md

Lines are compared as they are in the files, without indentation, blank lines and docstrings of
modules. A line counts if the ported script has it and the plain one does not; lines that a port
only leaves out do not count. Three ports are examples of one file; in these, code that the folder's
other scripts import does not count, nor code that only this needs.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PORTS = EXAMPLES / "ports"
BEGIN, END = "<!-- counted: ports -->", "<!-- end -->"
HABITS = {
    "dcgan": "two optimizers, two backward passes for one of them, BatchNorm",
    "siamese": "a dataset that draws pairs at random, a score after each epoch",
    "time_sequence": "LBFGS: a closure that is evaluated many times a step, double precision",
    "actor_critic": "no dataset: episodes, a running average that ends training",
    "ddpm": "an average of weights in a class of its own, updated through `.data`",
    "distillation": "two trainings one after the other, a frozen teacher",
    "sam": "an optimizer around another one, two passes for each update",
    "gcn": "the whole graph in each step, a sparse matrix",
    "mixed_precision": "autocast, GradScaler, accumulation, clipping, a warm-up",
    "knowledge_tracing": "padding, ReduceLROnPlateau, early stopping, the best weights put back",
    "titan": "a trainer for specs, layers sharded by FSDP2, accumulation, clipping, checkpoints",
    "moco": "an averaged teacher, a queue of keys from all tasks",
    "ppo": "environments that go on, rollouts that are used four times, a running average",
    "word_lm": "a hidden state that goes on from batch to batch, columns of a text",
}


def lines_of(path: Path) -> list[str]:
    """Return the lines of a script that count, without indentation."""
    text = path.read_text()
    body = ast.parse(text).body[1:]  # without the module's docstring
    if path.parent == EXAMPLES:
        body = _without_shared(body, set(_shared_names(PORTS / path.stem / "model.py")))
    lines = text.splitlines()
    kept = (line for part in body for line in lines[part.lineno - 1 : part.end_lineno])
    return [line.strip() for line in kept if line.strip()]


def _shared_names(model: Path) -> Iterator[str]:
    """Yield the names that a folder's model.py imports from the example."""
    for part in ast.parse(model.read_text()).body:
        if isinstance(part, ast.ImportFrom) and part.module == model.parent.name:
            yield from (each.name for each in part.names)


def _without_shared(body: list[ast.stmt], shared: set[str]) -> list[ast.stmt]:
    """Leave out the definitions of shared names, and then all definitions without another use."""
    kept = [part for part in body if not shared & _defined(part)]
    while True:
        used = [set(_used(part)) for part in kept]
        needed = [
            part
            for number, part in enumerate(kept)
            if not _defined(part)
            or _defined(part) & set().union(*used[:number], *used[number + 1 :])
        ]
        if needed == kept:
            return kept
        kept = needed


def _defined(part: ast.stmt) -> set[str]:
    if isinstance(part, ast.Import | ast.ImportFrom):
        return {(each.asname or each.name).split(".")[0] for each in part.names}
    if isinstance(part, ast.FunctionDef | ast.ClassDef):
        return {part.name}
    targets = part.targets if isinstance(part, ast.Assign) else []
    return {
        each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)
    }


def _used(part: ast.stmt) -> Iterator[str]:
    for each in ast.walk(part):
        if isinstance(each, ast.Name):
            yield each.id


def added(plain: Path, port: Path) -> int:
    """Return the number of lines of a port that the plain script lacks."""
    match = difflib.SequenceMatcher(None, lines_of(plain), lines_of(port), autojunk=False)
    return sum(j2 - j1 for kind, _, _, j1, j2 in match.get_opcodes() if kind != "equal")


def names() -> list[str]:
    """Return the ports' names, in order."""
    return sorted(path.parent.name for path in PORTS.glob("*/plain.py"))


def port_of(name: str) -> Path:
    """Return the script that is brought to Holdfast."""
    path = PORTS / name / "train.py"
    return path if path.exists() else EXAMPLES / f"{name}.py"


def table() -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| script | habits | lines of the loop | changed or added: Holdfast | plain DDP |"
    yield "|---|---|---|---|---|"
    for name in names():
        plain, ddp, port = PORTS / name / "plain.py", PORTS / name / "ddp.py", port_of(name)
        link = f"[{name}](../{port.relative_to(EXAMPLES.parent)})"
        counts = f"{len(lines_of(plain))} | {added(plain, port)} | {added(plain, ddp)}"
        yield f"| {link} | {HABITS[name]} | {counts} |"


if __name__ == "__main__":
    print("\n".join(table()))
