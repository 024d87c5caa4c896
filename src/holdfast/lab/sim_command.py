"""`holdfast sim` runs the deterministic simulation and reports its findings plainly."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from holdfast.engine.net.standard_streams import print_plain
from holdfast.lab.sim.swarm import Result, Summary, run_many, run_seed
from holdfast.lab.sim.table_servers import find_failure

NODES_MAX = 100_000  # each takes some memory, and events by the million
SEED_END = 1 << 63
T = TypeVar("T")


def main(argv: list[str] | None = None) -> int:
    """Return 0 if every seed is clean, 1 if one is not; 2 for bad arguments."""
    args = _parser().parse_args(argv)
    try:
        if args.tables:
            return _run_tables(args)
        return _run_one(args) if args.seed is not None else _run_seeds(args)
    except KeyboardInterrupt:
        print_plain("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="holdfast sim",
        description="Run the real state machines in a simulated world full of faults, from seeds.",
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=_seed, metavar="N", help="run one seed")
    which.add_argument("--seeds", type=_seeds, metavar="A:B", help="run seeds A to B-1")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--small", action="store_true", help="small jobs: shorter runs, more seeds")
    size.add_argument(
        "--nodes", type=_nodes, metavar="N", help="a large job on N nodes, up to 10,000 and more"
    )
    size.add_argument(
        "--tables", action="store_true", help="servers of tables and their clients, instead"
    )
    parser.add_argument("--trace", action="store_true", help="with --seed: print every event")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def _seed(text: str) -> int:
    if not text.isdecimal() or _number(text) >= SEED_END:
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is not a seed: give a number such as 7, below {SEED_END}"
        )
    return int(text)


def _nodes(text: str) -> int:
    if not text.isdecimal() or not 2 <= _number(text) <= NODES_MAX:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of nodes that can be simulated: give 2 to {NODES_MAX}"
        )
    return int(text)


def _number(text: str) -> int:
    """Return the number; one with too many digits for Python counts as too large for a seed."""
    return int(text) if len(text) <= len(str(SEED_END)) else SEED_END + 1


def _seeds(text: str) -> range:
    first, colon, last = text.partition(":")
    decimal = colon and first.isdecimal() and last.isdecimal()
    if not decimal or not _number(first) < _number(last) <= SEED_END:
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is not a range of seeds: give first:last+1, such as 0:200"
        )
    return range(int(first), int(last))


def _run_tables(args: argparse.Namespace) -> int:
    """Simulate servers of tables."""
    seeds = range(args.seed, args.seed + 1) if args.seed is not None else args.seeds
    found = _with_progress(((seed, find_failure(seed)) for seed in seeds), seeds)
    failed = [{"seed": seed, "failure": failure} for seed, failure in found if failure]
    if args.json:
        print_plain(json.dumps({"seeds": len(seeds), "failed": failed}))
        return 1 if failed else 0
    for each in failed:
        print_plain(f"seed {each['seed']}: {each['failure']}")
        print_plain(f"  holdfast sim --tables --seed {each['seed']}")
    print_plain(f"{len(seeds)} seeds of servers of tables, {len(failed)} failed")
    return 1 if failed else 0


def _run_one(args: argparse.Namespace) -> int:
    started = time.perf_counter()
    listener = print if args.trace and not args.json else None
    result = run_seed(args.seed, small=args.small, nodes=args.nodes, listener=listener)
    summary = Summary()
    summary.add(result)
    if args.json:
        print_plain(json.dumps(dataclasses.asdict(result) | {"replay": result.replay}))
    else:
        _show(result, events=not args.trace)
        _show_summary(summary, time.perf_counter() - started)
    return 1 if result.failure else 0


def _run_seeds(args: argparse.Namespace) -> int:
    started = time.perf_counter()
    summary, failed = Summary(), []
    for result in _with_progress(run_many(args.seeds, args.small, args.nodes), args.seeds):
        summary.add(result)
        if result.failure:
            seed, failure = result.options.seed, result.failure
            failed.append({"seed": seed, "failure": failure, "replay": result.replay})
            if not args.json:
                _show(result, events=False)
    elapsed_s = time.perf_counter() - started
    if args.json:
        rate = {"elapsed_s": elapsed_s, "events_per_s": summary.events / elapsed_s}
        print_plain(json.dumps(dataclasses.asdict(summary) | rate | {"failed": failed}))
    else:
        _show_summary(summary, elapsed_s)
    return 1 if failed else 0


def _with_progress(results: Iterator[T], seeds: Sequence[int]) -> Iterator[T]:
    """Show a progress bar where a person watches; elsewhere nothing."""
    if not sys.stderr.isatty():
        yield from results
        return
    from rich.progress import track

    from holdfast.engine.commands.plain_console import PlainConsole

    yield from track(results, "simulating", len(seeds), console=PlainConsole(stderr=True))


def _show(result: Result, events: bool) -> None:
    if not result.failure:
        return
    for line in result.story if events else ():
        print_plain(line)
    print_plain(
        f"seed {result.options.seed} FAILED at {result.simulated_s:.3f} s: {result.failure}"
    )
    print_plain(f"  replay: {result.replay}")


def _show_summary(summary: Summary, elapsed_s: float) -> None:
    verdict = f"{summary.failures} FAILED" if summary.failures else "all clean"
    seeds = "1 seed" if summary.seeds == 1 else f"{summary.seeds} seeds"
    print_plain(
        f"{seeds}, {verdict}: {summary.events} events ({summary.events / elapsed_s:,.0f}/s), "
        f"{summary.simulated_s:,.0f} simulated s in {elapsed_s:.1f} s"
    )
    faults = ", ".join(f"{kind} {count}" for kind, count in sorted(summary.faults.items()))
    total = sum(summary.faults.values())
    print_plain(
        f"  {summary.views} views, {summary.commits} commits by workers, "
        f"{summary.spawns} processes, {total} faults ({faults or 'none'})"
    )


if __name__ == "__main__":
    sys.exit(main())
