"""Learns, in a tree without bugs, which functions each test reaches, and the result of each seed.

The results are kept next to the tree, and learnt again when the code or a test file changes.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mutants import checks, scope
from mutants.bench import Bench
from mutants.planting import Mutant, Planter

LEARN_S_MAX = 3600.0
QUICK_S = 1.0  # tests that take longer come after the simulator


class Learnt:
    """Keeps the tests and the seeds that reach each function."""

    def __init__(
        self,
        reached: dict[str, checks.Reach],
        seeds: Sequence[checks.Seed],
        seeds_of: dict[str, list[int]],
    ) -> None:
        self._reached = reached
        self._seeds = seeds
        self._seeds_of = seeds_of

    def plan(self, mutant: Mutant, planter: Planter, root: Path, test_s: float) -> checks.Plan:
        """Choose the checks for a mutant: the checks that reach its function, or its module."""
        first = planter.first_lines.get(mutant.function)
        place = "" if first is None else f"{mutant.path}:{first}"
        if not any(place in each.calls for each in self._reached.values()):
            place = ""  # a mistake in code that runs on import shows wherever the module is used

        def here(call: str) -> bool:
            return call == place if place else call.startswith(f"{mutant.path}:")

        tests = [
            (each.took_s, name, each)
            for name, each in self._reached.items()
            if any(here(call) for call in each.calls)
            or (not place and imports(root / name.partition("::")[0], mutant.path))
        ]
        tests.sort(key=lambda test: test[:2])
        brief = [name for s, name, each in tests if s <= QUICK_S and not each.processes]
        light = [name for name in brief if is_light(root / name.partition("::")[0])]
        seeds = {seed for call, found in self._seeds_of.items() if here(call) for seed in found}
        others = scope.DRIVER_TESTS if mutant.path in scope.DRIVERS else ()
        return checks.Plan(
            light=light,
            quick=[name for name in brief if name not in light],
            seeds=[each for each in self._seeds if each.seed in seeds],
            thorough=[*(name for _, name, _ in tests if name not in brief), *others],
            test_s_max=test_s,
        )


def learn(bench: Bench, root: Path, files: Sequence[str], seeds: range) -> Learnt:
    """Read the results kept next to the tree, and learn the missing ones."""
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
    key = f"reach of seeds {seeds.start}:{seeds.stop} {code}"
    if key not in known:
        known[key] = bench.do(lambda tree: checks.know_seeds(seeds, tree), LEARN_S_MAX, keep=True)
        if known[key] is None:
            raise SystemExit(f"a seed fails without any bug:\n{bench.log.read_text()[-3000:]}")
    fresh[key] = known[key]
    _keep(store, fresh)
    return Learnt(reached, [checks.Seed(*each) for each in known[key][0]], known[key][1])


@functools.cache
def is_light(file: Path) -> bool:
    """Return whether a test file, with the files it imports from its folder, does without torch."""
    texts = [each.read_text("utf-8") for each in _imported(file) if each.stem != "conftest"]
    return not any(re.search(r"import torch|holdfast\.(train|testing)", text) for text in texts)


@functools.cache
def imports(file: Path, module: str) -> bool:
    """Return whether a test file imports a module, perhaps only to read its constants."""
    package, _, name = (
        module.removeprefix("src/").removesuffix(".py").replace("/", ".").rpartition(".")
    )
    lines = file.read_text("utf-8")
    return bool(
        re.search(rf"^from {re.escape(package)}\.{name} import", lines, re.MULTILINE)
        or re.search(rf"^from {re.escape(package)} import .*\b{name}\b", lines, re.MULTILINE)
    )


def _keep(store: Path, known: dict[str, Any]) -> None:
    store.parent.mkdir(exist_ok=True)
    store.write_text(json.dumps(known))


def _reach(name: str, tree: Path) -> dict[str, Any]:
    tracer = checks.reach([name], tree)
    assert not tracer.failed, f"tests fail without any bug: {tracer.failed}"
    return {test: asdict(each) for test, each in tracer.reached.items()}


def _imported(file: Path) -> list[Path]:
    """Return a test file, and the files that it imports from its folder."""
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
