"""Learns once, in a tree without bugs, which tests reach which function and what seeds come to.

What was learnt is kept beside the tree and learnt anew when the code or a test file changes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mutants import checks
from mutants.bench import Bench
from mutants.planting import Mutant, Planter

LEARN_S_MAX = 3600.0
QUICK_S = 1.0  # tests that take longer come after the simulator


class Learnt:
    """Knows the tests by what they reach, and the seeds."""

    def __init__(self, reached: dict[str, checks.Reach], seeds: list[tuple[float, int]]) -> None:
        self.reached = reached
        self.seeds = seeds

    def tests_of(self, mutant: Mutant, planter: Planter) -> tuple[list[str], list[str]]:
        """Return the tests that reach the bug's function, or module: quick and others."""
        first = planter.first_lines.get(mutant.function)
        place = f"{mutant.path}:{first}" if first is not None else f"{mutant.path}:"
        names = [
            (reach.took_s, name)
            for name, reach in self.reached.items()
            if any(
                call == place or (first is None and call.startswith(place)) for call in reach.calls
            )
        ]
        names.sort()
        ours = [(s, n) for s, n in names if not self.reached[n].processes]
        quick = [name for took_s, name in ours if took_s <= QUICK_S]
        return quick, [name for _, name in names if name not in quick]


def learn(bench: Bench, root: Path, files: Sequence[str], seeds: range) -> Learnt:
    """Take what is known from the store beside the tree, and learn the rest."""
    store = root / ".mutants" / "learnt.json"
    known: dict[str, Any] = json.loads(store.read_text()) if store.exists() else {}
    code = _digest(sorted((bench.scratch / "src").rglob("*.py")))
    reached: dict[str, checks.Reach] = {}
    fresh: dict[str, Any] = {}
    for name in files:
        key = f"{name} {code} {_digest(_imported(bench.scratch / name))}"
        if key not in known:
            known[key] = bench.do(
                lambda tree, name=name: _reach(name, tree), LEARN_S_MAX, keep=True
            )
            if known[key] is None:
                raise SystemExit(f"{name} fails without any bug:\n{bench.log.read_text()[-3000:]}")
            _keep(store, known)
        fresh[key] = known[key]
        reached |= {test: checks.Reach(**each) for test, each in known[key].items()}
    key = f"seeds {seeds.start}:{seeds.stop} {code}"
    if key not in known:
        known[key] = bench.do(lambda tree: checks.know_seeds(seeds), LEARN_S_MAX, keep=True)
        if known[key] is None:
            raise SystemExit(f"a seed fails without any bug:\n{bench.log.read_text()[-3000:]}")
    fresh[key] = known[key]
    _keep(store, fresh)
    return Learnt(reached, [(took_s, digest) for took_s, digest in known[key]])


def _keep(store: Path, known: dict[str, Any]) -> None:
    store.parent.mkdir(exist_ok=True)
    store.write_text(json.dumps(known))


def _reach(name: str, tree: Path) -> dict[str, Any]:
    tracer = checks.reach([name], tree)
    assert not tracer.failed, f"tests fail without any bug: {tracer.failed}"
    return {test: asdict(each) for test, each in tracer.reached.items()}


def _imported(file: Path) -> list[Path]:
    """Return a test file, and what it imports from beside it."""
    found, todo = {file.with_name("conftest.py"), file}, [file]
    while todo:
        names = re.findall(r"^(?:from|import) (\w+)", todo.pop().read_text("utf-8"), re.MULTILINE)
        beside = [file.with_name(f"{name}.py") for name in names]
        todo += [each for each in beside if each.exists() and each not in found]
        found.update(todo)
    return sorted(found)


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
