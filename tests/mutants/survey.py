"""Plants random bugs and reports which of them no check notices: `make mutants`.

    python -m mutants.survey --seed 7 --count 200        a fresh random sample
    python -m mutants.survey --only '*/core/tree.py'     of these files only
    python -m mutants.survey --seed 7 --resume FILE      continue an interrupted one
    python -m mutants.survey --again FILE                the survivors of an earlier one

Bugs are planted in the core and in the drivers of a step. The status is 1 if fewer than 90 % of the
bugs that change anything are caught.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from fnmatch import fnmatch
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from mutants import checks, equivalents, knowledge_base, scope, table
from mutants.bench import Bench, checked
from mutants.planting import Mutant, Planter, draw
from mutants.rules import Knowledge

ROOT = Path(__file__).resolve().parent.parent.parent
MUTANT_S_MAX = 1800.0  # time limit for all checks of one mutant
WANTED = 0.9  # share of the mutants that change anything and must be caught


def main(arguments: Sequence[str] | None = None) -> int:
    """Survey a sample; print a table of the survivors."""
    args = _parser().parse_args(arguments)
    survey = Survey(args.root, args.only or ["*"], args.test_s)
    sample = survey.sample(args.seed, args.count) if not args.again else survey.named(args.again)
    known = equivalents.read(args.root / equivalents.FILE)
    done = _results(args.resume) if args.resume else {}
    file = args.resume or args.results
    todo = [m for m in sample if m.name not in done and known.reason(m) is None]
    for mutant, outcome in _progress(_checked(survey, todo, args) if todo else iter(()), todo):
        done[mutant.name] = outcome
        if file is not None:
            with file.open("a", encoding="utf-8") as out:
                out.write(json.dumps({"name": mutant.name, "outcome": outcome}) + "\n")
    found = [(m, done.get(m.name), known.reason(m)) for m in sample]
    report = table.Report.of(args.seed, found)
    print(json.dumps(report.record()) if args.json else report.markdown())
    return 0 if report.share >= WANTED else 1


def _checked(
    survey: Survey, todo: Sequence[Mutant], args: argparse.Namespace
) -> Iterator[tuple[Mutant, dict[str, Any]]]:
    """Check mutants in scratch copies of the tree; yield the outcome of each."""
    checks.preload()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="holdfast-mutants-") as folder:
        benches = [Bench(args.root, Path(folder) / f"tree{i}") for i in range(args.jobs)]
        try:
            benches[0].make()
            learnt = knowledge_base.learn(
                benches[0], args.root, scope.test_files(args.root), args.seeds
            )
            for bench in benches[1:]:
                bench.make()
            yield from survey.run(todo, benches, learnt)
        finally:
            for bench in benches:
                bench.end()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mutants", description="Plant bugs; see who notices.")
    parser.add_argument("--seed", type=int, default=0, help="of the random sample")
    parser.add_argument("--count", type=int, default=200, help="mutants in the sample")
    parser.add_argument(
        "--only", action="append", metavar="GLOB", help="files to plant them in; may be repeated"
    )
    parser.add_argument("--jobs", type=int, default=1, help="mutants that are checked at a time")
    parser.add_argument("--seeds", type=_seeds, default=range(200), metavar="A:B")
    parser.add_argument("--results", type=Path, metavar="FILE", help="add each result to it")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="go on from these results")
    parser.add_argument("--again", type=Path, metavar="FILE", help="only its survivors, once more")
    parser.add_argument("--root", type=Path, default=ROOT, help="another tree")
    parser.add_argument("--test-s", type=float, default=60.0, help="a test may take, in seconds")
    parser.add_argument("--json", action="store_true", help="instead of the table")
    return parser


def _seeds(text: str) -> range:
    first, _, stop = text.partition(":")
    return range(int(first), int(stop))


def _results(file: Path) -> dict[str, Any]:
    lines = file.read_text("utf-8").splitlines() if file.exists() else []
    return {each["name"]: each["outcome"] for each in map(json.loads, lines)}


class Survey:
    """Draws samples from the code of a tree and has them checked."""

    def __init__(self, root: Path, only: Sequence[str], test_s: float = 60.0) -> None:
        self._root = root
        self._only = only
        self._test_s = test_s
        self._planters: dict[str, Planter] = {}
        self._sources: dict[str, bytes] = {}

    def mutants(self) -> dict[str, list[Mutant]]:
        """Return all mutants of each file."""
        paths = [p for p in scope.paths(self._root) if any(fnmatch(p, glob) for glob in self._only)]
        knowledge = Knowledge()
        self._sources = {path: (self._root / path).read_bytes() for path in paths}
        for path in scope.paths(self._root):
            knowledge.learn((self._root / path).read_bytes())
        self._planters = {p: Planter(p, source, knowledge) for p, source in self._sources.items()}
        return {path: planter.mutants() for path, planter in self._planters.items()}

    def sample(self, seed: int, count: int) -> list[Mutant]:
        """Draw a sample."""
        mutants = self.mutants()
        return draw(mutants, self._sources, seed, count)

    def named(self, results: Path) -> list[Mutant]:
        """Return the mutants that survived before, if their code is still there."""
        survivors = {name for name, outcome in _results(results).items() if not outcome["by"]}
        return [m for found in self.mutants().values() for m in found if m.name in survivors]

    def run(
        self, mutants: Sequence[Mutant], benches: Sequence[Bench], learnt: knowledge_base.Learnt
    ) -> Iterator[tuple[Mutant, dict[str, Any]]]:
        """Yield each mutant with its outcome."""
        todo, busy = list(reversed(mutants)), dict[Bench, Mutant]()
        while todo or busy:
            for bench in benches:
                if bench not in busy and todo:
                    busy[bench] = mutant = todo.pop()
                    planter = self._planters[mutant.path]
                    plan = learnt.plan(mutant, planter, self._root, self._test_s)
                    bench.plant(mutant)
                    bench.start(checked(plan), MUTANT_S_MAX)
            wait([bench.reads for bench in busy], 0.5)
            for bench, mutant in list(busy.items()):
                over, outcome = bench.poll()
                if over:
                    del busy[bench]
                    bench.mend()
                    yield mutant, outcome or asdict(checks.Outcome(by="its end"))


def _progress(
    results: Iterator[tuple[Mutant, dict[str, Any]]], todo: Sequence[Mutant]
) -> Iterator[tuple[Mutant, dict[str, Any]]]:
    """Show a progress bar on a terminal, and no bar elsewhere."""
    if not sys.stderr.isatty():
        yield from results
        return
    from rich.console import Console
    from rich.progress import Progress

    # The bar's own thread would be in the way of forking.
    with Progress(console=Console(stderr=True), auto_refresh=False) as bar:
        task = bar.add_task("mutants", total=len(todo))
        survivors = 0
        for mutant, outcome in results:
            survivors += not outcome["by"]
            bar.update(task, advance=1, description=f"mutants, {survivors} survived")
            bar.refresh()
            yield mutant, outcome


if __name__ == "__main__":
    sys.exit(main())
