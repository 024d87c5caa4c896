"""Searches for scripts that break the promise in silence.

    python -m tests.script_search --seeds 0:500              in threads, some minutes
    python -m tests.script_search --seeds 0:40 --processes   each worker a process
    python -m tests.script_search --seeds 17 --show          print the script and its results

Prints how many scripts were exact, refused and silently wrong. The status is 1 if one was silently
wrong, if a harmless one was refused, or if one ended otherwise.
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "kits"))

from rich.console import Console
from rich.progress import track
from rich.table import Table

from script_search.compose import compose
from script_search.runs import CRASH, FALSE, SILENT, VERDICTS, Result, examine_all

BAD = (SILENT, FALSE, CRASH)
SEEDS_A_PROCESS = 10  # a fresh process follows, because scripts leave things behind


def main(arguments: Sequence[str] | None = None) -> int:
    """Examine the scripts of some seeds, and print the table."""
    parser = argparse.ArgumentParser(prog="script_search", description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", default="0:100", help="A:B, or one seed")
    parser.add_argument("--processes", action="store_true", help="each worker a process")
    parser.add_argument("--jobs", type=int, default=2, help="scripts at a time (default 2)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--show", action="store_true", help="print scripts and all messages")
    options = parser.parse_args(arguments)
    first, _, end = options.seeds.partition(":")
    seeds = range(int(first), int(end) if end else int(first) + 1)
    console = Console(stderr=True)
    every = examined(seeds, options.jobs, processes=options.processes)
    shown = track(every, "scripts", len(seeds), console=console, disable=not console.is_terminal)
    results = sorted(shown, key=lambda each: each.seed)
    if options.json:
        print(json.dumps([asdict(each) for each in results], indent=1))
    else:
        report(results, show=options.show)
    return int(any(each.verdict in BAD for each in results))


def examined(seeds: Sequence[int], jobs: int, *, processes: bool) -> Iterator[Result]:
    """Examine scripts in several processes; yield results as they come."""
    context = multiprocessing.get_context("forkserver")
    # The libraries that optimizers import take long as well; all are imported once.
    context.set_forkserver_preload(["script_search.runs", "torch._dynamo"])
    parts = [seeds[i : i + SEEDS_A_PROCESS] for i in range(0, len(seeds), SEEDS_A_PROCESS)]
    with ProcessPoolExecutor(jobs, context, max_tasks_per_child=1) as pool:
        futures = [pool.submit(examine_all, part, processes=processes) for part in parts]
        for future in as_completed(futures):
            yield from future.result()


def report(results: Sequence[Result], *, show: bool) -> None:
    """Print the table, and each script in a class that must be empty."""
    for each in results:
        if show:
            print(compose(each.seed).text)
        if show or each.verdict in BAD:
            print(f"seed {each.seed}: {each.verdict}: {each.what} (truth: {each.truth})")
            for run in each.runs:
                print(f"   {run.name}: {run.refused or run.digest}")
                for text in run.events:
                    print(f"      event: {text}")
    counts = collections.Counter((each.verdict, each.truth) for each in results)
    truths = list(dict.fromkeys(each.truth for each in results))
    table = Table("", *truths, "all")
    for verdict in VERDICTS:
        row = [counts[verdict, truth] for truth in truths]
        table.add_row(verdict, *map(str, row), str(sum(row)))
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
