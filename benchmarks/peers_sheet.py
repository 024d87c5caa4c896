"""Writes the sheet of `make bench-peers` from the results of its runs."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import peers_figures
import peers_launch
import peers_text
from peers_launch import RunResult

PACKAGES = ("torch", "torchft", "ray", "torchdata")
LOAD_MAX = 0.5  # the sheet marks runs for which the machine had a higher load before a run
ASK = "import importlib.metadata as m, sys; print(*map(m.version, sys.argv[1:]))"


def peer_versions(python: Path) -> dict[str, str]:
    """Return the versions of the packages in the peers' environment."""
    told = subprocess.run(
        [str(python), "-c", ASK, *PACKAGES], capture_output=True, text=True, check=True
    )
    return dict(zip(PACKAGES, told.stdout.split(), strict=True))


def head(results: Sequence[RunResult], versions: Mapping[str, str]) -> Iterator[str]:
    """Yield the title, and on what the sheet was measured."""
    today = datetime.datetime.now(datetime.timezone.utc).date()
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    yield f"# Measured on {today}"
    yield ""
    yield f"{os.cpu_count()} cores ({processor()}), Python {platform.python_version()}, {named},"
    yield "one thread per worker. `make bench-peers` writes this sheet again."
    loads = [result.load for result in results]
    if max(loads) > LOAD_MAX:
        yield ""
        yield "**The machine was busy with other work**: before a run its load was between"
        middle = statistics.median(loads)
        yield f"{min(loads):.0f} and {max(loads):.0f}, in the median {middle:.0f}. On an idle"
        yield "machine all times are shorter, most of all where processes start and import torch."
        yield "Compare the rows with each other; differences of a few per cent of a step's time"
        yield "have no meaning."


def processor() -> str:
    """Return the processor's name, as Linux reports it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def lines(results: Sequence[RunResult]) -> Iterator[str]:
    """Yield the sheet's sections."""
    yield ""
    yield from peers_text.RUNS.splitlines()
    yield ""
    yield "## kill -9 of one of 3 workers"
    yield ""
    yield from fault_table(results, "kill")
    yield ""
    yield from partial_lines(results)
    yield "## One of 3 workers frozen (SIGSTOP)"
    yield ""
    yield from peers_text.FROZEN.splitlines()
    yield ""
    yield from fault_table(results, "freeze")
    yield ""
    yield "## The model that comes out"
    yield ""
    yield from peers_text.MODEL.splitlines()
    yield ""
    yield from model_table(results)
    yield ""
    yield "## Steps without faults"
    yield ""
    yield from step_table(results)
    errors = [x for x in results if x.error and x.framework in whole_frameworks()]
    if errors:
        yield ""
        yield "## Runs that did not end well"
        for result in errors:
            kind = result.fault.kind if result.fault else "undisturbed"
            yield ""
            yield f"{result.framework}, {kind}:"
            yield ""
            yield from (f"    {line[:110]}" for line in result.error.splitlines())
    yield from peers_text.PEERS


def of_fault(results: Sequence[RunResult], framework: str, kind: str) -> list[RunResult]:
    """Return a framework's runs with one kind of fault."""
    return [
        result
        for result in results
        if result.framework == framework and result.fault and result.fault.kind == kind
    ]


def whole_frameworks() -> list[str]:
    """Return the frameworks that are measured in full."""
    return [name for name in peers_launch.FRAMEWORKS if name not in peers_launch.PARTIAL]


def spread(values: Sequence[float], form: str) -> str:
    """Return a median, and the worst in parentheses."""
    if not values:
        return "-"
    return f"**{form.format(statistics.median(values))}** ({form.format(max(values))})"


def fault_table(results: Sequence[RunResult], kind: str) -> Iterator[str]:
    """Yield the times of all faults of one kind."""
    yield (
        "| | trained to the end | pause | next new step late by | all at work again after "
        "| the epoch's end later by |"
    )
    yield "|---|---|---|---|---|---|"
    for framework in whole_frameworks():
        runs = of_fault(results, framework, kind)
        if not runs:
            continue
        done = [result for result in runs if not result.error]
        times = [peers_figures.recovery_times(result) for result in done]
        back = [each.all_s for each in times if each.all_s is not None]
        never = f"; never in {len(times) - len(back)}" if len(back) < len(times) else ""
        yield (
            f"| {framework} | {len(done)} of {len(runs)} "
            f"| {spread([each.pause_s for each in times], '{:.2f} s')} "
            f"| {spread([each.progress_s for each in times], '{:.2f} s')} "
            f"| {spread(back, '{:.1f} s')}{never} "
            f"| {spread([each.later_s for each in times], '{:.1f} s')} |"
        )


def partial_lines(results: Sequence[RunResult]) -> Iterator[str]:
    """Yield the results of runs without the change that we made to a framework elsewhere."""
    for framework, text in peers_text.PARTIAL.items():
        runs = of_fault(results, framework, "kill")
        if runs:
            yield from text.format(
                count=len(runs),
                ended=sum(survivors_ended(result) > 0 for result in runs),
                again=sum(first_step_after(result) == 0 for result in runs),
                failed=sum(bool(result.error) for result in runs),
            ).splitlines()
            yield ""


def survivors_ended(result: RunResult) -> int:
    """Return the number of processes that were not struck but did no more step after the fault."""
    made = peers_figures.commits(result.records)
    before = {each["pid"] for each in made if each["at"] <= result.struck_at}
    after = {each["pid"] for each in made if each["at"] > result.struck_at}
    return len(before - after - {result.victim_pid})


def first_step_after(result: RunResult) -> int | None:
    """Return the smallest step that was committed after the fault."""
    made = peers_figures.commits(result.records)
    return min((each["step"] for each in made if each["at"] > result.struck_at), default=None)


def model_table(results: Sequence[RunResult]) -> Iterator[str]:
    """Yield how the epoch's samples were used, and whether the bits are the undisturbed ones."""
    yield (
        "| | wasted batches | samples used twice | samples never used | same bits as undisturbed "
        "| undisturbed runs |"
    )
    yield "|---|---|---|---|---|---|"
    for framework in whole_frameworks():
        runs = [x for x in of_fault(results, framework, "kill") if not x.error]
        calm = undisturbed(results, framework)
        if not runs or not calm:
            continue
        uses = [peers_figures.sample_use(result) for result in runs]
        bits = set().union(*(peers_figures.digests(result) for result in calm))
        calm_vain = statistics.median(peers_figures.sample_use(x).vain for x in calm)
        same = sum(peers_figures.digests(result) == bits for result in runs)

        def column(pick: Callable[[peers_figures.SampleUse], int], uses=uses) -> str:
            return spread([pick(use) for use in uses], "{:.0f}")

        yield (
            f"| {framework} | {column(lambda use: use.vain)} [{calm_vain:.0f}] "
            f"| {column(lambda use: use.twice)} "
            f"| {column(lambda use: use.never)} | {same} of {len(runs)} "
            f"| {'one model' if len(bits) == 1 else f'{len(bits)} models'} from {len(calm)} |"
        )


def undisturbed(results: Sequence[RunResult], framework: str) -> list[RunResult]:
    """Return a framework's runs without a fault, if they ended well."""
    return [
        result
        for result in results
        if result.framework == framework and result.fault is None and not result.error
    ]


def step_table(results: Sequence[RunResult]) -> Iterator[str]:
    """Yield the times of undisturbed steps, next to DDP's in torchrun."""
    times = {
        framework: [peers_figures.usual_step_s(x) for x in undisturbed(results, framework)]
        for framework in whole_frameworks()
    }
    medians = {name: statistics.median(each) for name, each in times.items() if each}
    yield "| | median step | against plain DDP |"
    yield "|---|---|---|"
    for name, each in medians.items():
        ratio = f"{each / medians['torchrun']:.3f}" if "torchrun" in medians else "-"
        yield f"| {name} | {each * 1e3:.1f} ms | {ratio} |"
