"""Counts the lines that bring each script of examples/ports to Holdfast, and to plain DDP.

    python tests/port_counts.py     prints the table of docs/porting.md

Lines are compared as they stand in the files, without indentation, blank lines and docstrings of
modules. A line counts if the ported script has it and the plain one has not; what a port only
leaves out does not count.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from pathlib import Path

PORTS = Path(__file__).resolve().parent.parent / "examples" / "ports"
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
}


def lines_of(path: Path) -> list[str]:
    """Return the lines of a script that count, without indentation."""
    text = path.read_text()
    first = ast.parse(text).body[0]  # the module's docstring
    rest = text.splitlines()[first.end_lineno :]
    return [line.strip() for line in rest if line.strip()]


def added(plain: Path, port: Path) -> int:
    """Return how many lines of a port the plain script lacks."""
    match = difflib.SequenceMatcher(None, lines_of(plain), lines_of(port), autojunk=False)
    return sum(j2 - j1 for kind, _, _, j1, j2 in match.get_opcodes() if kind != "equal")


def names() -> list[str]:
    """Return the ports' names, in order."""
    return sorted(path.parent.name for path in PORTS.glob("*/train.py"))


def table() -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| script | habits | lines of the loop | changed or added: Holdfast | plain DDP |"
    yield "|---|---|---|---|---|"
    for name in names():
        plain, port, ddp = (PORTS / name / f"{kind}.py" for kind in ("plain", "train", "ddp"))
        link = f"[{name}](../examples/ports/{name}/train.py)"
        counts = f"{len(lines_of(plain))} | {added(plain, port)} | {added(plain, ddp)}"
        yield f"| {link} | {HABITS[name]} | {counts} |"


if __name__ == "__main__":
    print("\n".join(table()))
