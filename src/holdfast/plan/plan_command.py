"""`holdfast plan` chooses how a job is protected, by what failures and protection cost."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from holdfast.engine.commands.plain_console import PlainConsole
from holdfast.engine.core.errors import UserError
from holdfast.engine.net.standard_streams import print_plain
from holdfast.engine.records.incidents import Part
from holdfast.engine.runtime.rundir import RunDir, read_goodput, read_run_events
from holdfast.plan.advice import FAILURES, advise
from holdfast.plan.distributions import Interval, read_interval
from holdfast.plan.failure_tables import DAY_S, TABLES, FailureModel, find_model
from holdfast.plan.job_file import write_job_file
from holdfast.plan.report import list_lines, to_plain
from holdfast.plan.scenario import GB, Cluster, Costs, Scenario, Work
from holdfast.plan.traces import fit_trace, read_trace

Number = TypeVar("Number", int, float)


def main(argv: Sequence[str]) -> int:
    """Run the command; `argv` follows `holdfast plan`."""
    options = parser().parse_args(argv)
    scenario = make_scenario(options)
    with _spin(quiet=options.json):
        advice = advise(scenario, options.seed, failures=options.machines)
    if options.output is not None:
        write_job_file(options.output, advice)
    if options.plot is not None:
        from holdfast.plan.plot import draw_plan  # imports matplotlib

        draw_plan(options.plot, advice)
    if options.json:
        print_plain(json.dumps(to_plain(advice), indent=2))
        return 0
    for line in list_lines(advice):
        print_plain(line)
    if options.output is not None:
        print_plain(f"job: {options.output}: holdfast run --config {options.output} SCRIPT")
    if options.plot is not None:
        print_plain(f"plot: {options.plot}")
    return 0


@contextlib.contextmanager
def _spin(*, quiet: bool) -> Iterator[None]:
    if quiet or not sys.stderr.isatty():
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=PlainConsole(stderr=True), transient=True) as progress:
        progress.add_task("comparing choices and playing weeks of failures")
        yield


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="holdfast plan",
        description="Choose the interval of checkpoints, redundancy in memory, spares, virtual "
        "ranks and lease of a job, by what each costs and what failures cost. X is a number, and "
        "X:Y an interval that holds the true value.",
    )
    _add_cluster(found.add_argument_group("cluster"))
    _add_job(found.add_argument_group("job"))
    _add_failures(found.add_argument_group("failures"))
    _add_costs(found.add_argument_group("costs of a recovery"))
    output = found.add_argument_group("output")
    output.add_argument("--output", type=Path, metavar="FILE", help="write a job.toml")
    output.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the balance (.png, .svg or .pdf)"
    )
    output.add_argument("--json", action="store_true", help="for scripts")
    output.add_argument(
        "--machines",
        type=_not_negative_count,
        default=FAILURES,
        metavar="N",
        help=f"failures that the real machines play in the simulator ({FAILURES})",
    )
    output.add_argument("--seed", type=int, default=0, help="of the weeks that are played (0)")
    return found


def _add_cluster(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--nodes", type=_count, required=True, help="nodes, spares included")
    group.add_argument("--gpus-per-node", type=_count, default=8, metavar="N", help="(8)")
    group.add_argument(
        "--domain-nodes",
        type=_count,
        default=0,
        metavar="N",
        help="nodes of a failure domain, such as a rack (none)",
    )
    group.add_argument(
        "--network", type=_positive, default=50.0, metavar="GB", help="of a node, in GB/s (50)"
    )
    group.add_argument(
        "--memory",
        type=_positive,
        default=512.0,
        metavar="GB",
        help="of a node that copies of the state may fill (512)",
    )
    group.add_argument(
        "--store",
        type=_not_negative,
        default=20.0,
        metavar="GB",
        help="GB/s that all nodes together write to the store; 0: there is none (20)",
    )
    group.add_argument(
        "--replace-s",
        type=_interval,
        metavar="X:Y",
        help="until the cluster manager gives another node for a lost one (its repair)",
    )
    group.add_argument(
        "--gpu-hour", type=_not_negative, default=0.0, metavar="DOLLARS", help="of one GPU"
    )


def _add_job(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--state", type=_positive, required=True, metavar="GB", help="model and optimizer, once"
    )
    group.add_argument("--step-s", type=_positive, metavar="S", help="of a step on all nodes")
    group.add_argument(
        "--worker-gpus",
        type=_count,
        default=1,
        metavar="N",
        help="GPUs that hold one copy of the state together (1)",
    )
    group.add_argument(
        "--shard-optimizer", action="store_true", help="each worker holds a share only (ZeRO-1)"
    )
    group.add_argument(
        "--from",
        dest="runs",
        type=Path,
        nargs="+",
        default=[],
        metavar="RUN",
        help="take the times of steps, starts and saves and the rate of losses from finished runs",
    )


def _add_failures(group: argparse._ArgumentGroup) -> None:
    names = ", ".join(["published", *TABLES])
    group.add_argument(
        "--failures",
        default="published",
        metavar="MODEL",
        help=f"{names}, or a CSV file of your own (published: the range of all sources)",
    )
    group.add_argument(
        "--rate", type=_interval, metavar="X:Y", help="failures of 1,000 nodes in a day"
    )
    group.add_argument(
        "--shape",
        type=_positive,
        metavar="K",
        help="Weibull shape of the times between failures of one node, not of the job",
    )
    group.add_argument("--new", action="store_true", help="all nodes are new when the job begins")
    group.add_argument(
        "--waves", type=_interval, metavar="X:Y", help="preemptions of several nodes in a day (0)"
    )
    group.add_argument(
        "--wave-nodes", type=_count, default=1, metavar="N", help="nodes that a wave takes (1)"
    )
    group.add_argument(
        "--outages", type=_interval, metavar="X:Y", help="of the whole cluster in 30 days (0:1)"
    )


def _add_costs(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--opening-s",
        type=_interval,
        metavar="X:Y",
        help="to make the communicators again (1.4:4.2, more above 1,024 GPUs, as published)",
    )
    group.add_argument(
        "--start-s", type=_interval, metavar="X:Y", help="start of a process (30:120)"
    )
    group.add_argument(
        "--still-s",
        type=_positive,
        default=60.0,
        metavar="S",
        help="longest standstill of a healthy job, such as an evaluation (60)",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Lists costs that runs have measured; None: the runs do not show it.

    The time to open a group is left out: on CPUs it is milliseconds, and on GPUs seconds.
    """

    #: Median of the steps' durations.
    step_s: float | None = None
    #: Shortest and longest start of a process.
    start_s: Interval | None = None
    #: Mean standstill for a checkpoint.
    save_stall_s: float | None = None
    #: Losses of a worker in a second, with bounds that hold the true rate with 90 %.
    losses: Interval | None = None


def measure_runs(runs: Sequence[Path]) -> Measured:
    """Return the costs that these runs show. UserError if one of them has no times."""
    steps, starts = [], []
    stalls_s = workers_s = 0.0
    saves = losses = 0
    for path in runs:
        run_dir = RunDir(path)
        goodput, events = read_goodput(run_dir), read_run_events(run_dir)
        if goodput.step_counts:
            steps.append(goodput.step_quantile(0.5))
        of_workers = goodput.parts_by_worker().values()
        starts += [parts[Part.STARTING] for parts in of_workers if parts[Part.STARTING] > 0]
        stalls_s += sum(parts[Part.SAVING] for parts in of_workers) / max(len(of_workers), 1)
        workers_s += goodput.total_s
        saves += sum(e["kind"] == "save" and "is saved" in str(e["text"]) for e in events)
        losses += sum(event["kind"] == "lost" for event in events)
    spread = 1.645 * math.sqrt(losses)
    low, high = max(losses - spread, 0.05), losses + spread
    return Measured(
        step_s=median(steps) if steps else None,
        start_s=Interval(low=min(starts), high=max(starts)) if starts else None,
        save_stall_s=stalls_s / saves if saves and stalls_s > 0 else None,
        losses=Interval(low=low / workers_s, high=high / workers_s) if losses else None,
    )


def make_scenario(options: argparse.Namespace) -> Scenario:
    """Return the scenario that the options describe. UserError if they do not fit together."""
    cluster = Cluster(
        nodes=options.nodes,
        gpus_per_node=options.gpus_per_node,
        domain_nodes=options.domain_nodes,
        network_bytes_per_s=options.network * GB,
        memory_bytes=options.memory * GB,
        store_bytes_per_s=options.store * GB,
        replace_s=options.replace_s,
        gpu_hour=options.gpu_hour,
    )
    measured = measure_runs(options.runs) if options.runs else Measured()
    step_s = options.step_s or measured.step_s
    if step_s is None:
        raise UserError("the time of a step is missing: give --step-s, or --from a finished run")
    _check_sizes(options)
    work = Work(
        state_bytes=options.state * GB,
        step_s=step_s,
        worker_gpus=options.worker_gpus,
        shard_optimizer=options.shard_optimizer,
        longest_still_s=options.still_s,
    )
    return Scenario(
        cluster=cluster,
        work=work,
        costs=_make_costs(options, measured),
        model=_find(options, measured),
    )


def _check_sizes(options: argparse.Namespace) -> None:
    small, large = sorted((options.worker_gpus, options.gpus_per_node))
    if large % small:
        raise UserError(
            f"--worker-gpus {options.worker_gpus} must divide --gpus-per-node "
            f"{options.gpus_per_node}, or be a multiple of it"
        )
    if options.worker_gpus > options.nodes * options.gpus_per_node:
        raise UserError(
            f"--worker-gpus {options.worker_gpus} is more than the "
            f"{options.nodes * options.gpus_per_node} GPUs of --nodes {options.nodes}"
        )


def _make_costs(options: argparse.Namespace, measured: Measured) -> Costs:
    given = {
        "opening_s": options.opening_s,
        "start_s": options.start_s or measured.start_s,
        "outages": options.outages,
        "save_stall_s": measured.save_stall_s,
    }
    return dataclasses.replace(Costs(), **{k: v for k, v in given.items() if v is not None})


def _find(options: argparse.Namespace, measured: Measured) -> FailureModel:
    name = options.failures
    rate = options.rate
    if rate is None and measured.losses is not None:
        workers = options.gpus_per_node / options.worker_gpus
        rate = measured.losses.times(workers * DAY_S * 1000)
    if name.endswith(".csv"):
        model = fit_trace(read_trace(Path(name)), name, options.gpus_per_node)
    else:
        model = find_model(name, rate)
    return dataclasses.replace(
        model,
        rate=rate or model.rate,
        shape=options.shape or model.shape,
        is_new=options.new,
        waves=options.waves or model.waves,
        wave_nodes=options.wave_nodes,
    )


def _count(text: str) -> int:
    return _check(text, int, lambda n: n >= 1, "a whole number of at least 1")


def _positive(text: str) -> float:
    return _check(text, float, lambda x: 0 < x < 1e18, "a number above 0")


def _not_negative(text: str) -> float:
    return _check(text, float, lambda x: 0 <= x < 1e18, "a number of at least 0")


def _not_negative_count(text: str) -> int:
    return _check(text, int, lambda n: n >= 0, "a whole number of at least 0")


def _check(
    text: str, kind: Callable[[str], Number], is_right: Callable[[Number], bool], wanted: str
) -> Number:
    try:
        number = kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} must be {wanted}") from None
    if not is_right(number):
        raise argparse.ArgumentTypeError(f"{text} must be {wanted}")
    return number


def _interval(text: str) -> Interval:
    try:
        return read_interval(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
