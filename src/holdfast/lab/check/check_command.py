"""`holdfast check` tries a training script: on 1 worker, on 2, and with a kill and a join.

Equal states at every step show that the script keeps the promise; else the first tensor that
differs, and the kind of run with the difference, point to the cause.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from holdfast.engine.commands.plain_console import PlainConsole
from holdfast.engine.commands.run_command import check_present, script_of
from holdfast.engine.core.errors import UserError
from holdfast.engine.net.standard_streams import print_plain
from holdfast.engine.runtime.local_run import LocalRun
from holdfast.engine.runtime.temporary import temporary_folder

# Not imported here, because it loads torch.
TRACED = str(Path(__file__).with_name("traced.py"))
KILL_STEP = 3
STEPS_AFTER_JOIN = 6
ROOM_BYTES = 1 << 16  # a disk without so much room is full
POLL_S = 0.1
WORKERS = 2
ONE_MACHINE = (
    " (all workers of a check run on this machine: most likely the script makes them differ, and "
    "not the machine)"
)
GUARD = ("--fingerprint-steps", "1", "--repeat-steps", "2", "--abandon-s", "10")
States = Mapping[int, Mapping[str, str]]  # by step, then by path
START = (
    "the model or the data depend on something that is drawn before holdfast.join(), on the clock, "
    "or on the worker: build everything after holdfast.join(), and sort what a directory lists"
)
DIFFERS_BY_WORKER = (
    "an update depends on the worker: on a batch's own loss instead of step.loss, on job.worker or "
    "job.is_leader, on variables that change from batch to batch, or on random numbers that are "
    "not drawn from the global generators"
)
LACKS_AT_JOIN = (
    "a worker that joins lacks something: a variable of the script that steps change (keep it in "
    "job.values), a module, optimizer or scheduler that is not protected, or what a line did once "
    "at an earlier step"
)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="holdfast check",
        usage="%(prog)s [OPTION ...] SCRIPT [ARG ...]",
        allow_abbrev=False,  # options of the script would be taken for short forms of these
        description="Run the first steps of a training script on 1 worker, on 2, and on 2 again "
        "with one killed and started again, compare the bits step by step, and name what differs.",
    )
    found.add_argument(
        "script", nargs="?", default="", metavar="SCRIPT", help="the training script"
    )
    found.add_argument(
        "-m", "--module", action="store_true", help="SCRIPT is a module, as for `holdfast run`"
    )
    found.add_argument(
        "args", nargs=argparse.REMAINDER, metavar="ARG", help="arguments of the script"
    )
    found.add_argument(
        "--virtual", type=int, default=2, metavar="V", help="virtual ranks of the job (default 2)"
    )
    found.add_argument(
        "--procs-per-worker",
        type=int,
        default=1,
        metavar="G",
        help="processes that share a worker's model, as for `holdfast run` (default 1)",
    )
    found.add_argument(
        "--steps", type=int, default=12, metavar="N", help="compare at least N steps (default 12)"
    )
    found.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="give up a run that takes longer (default 300)",
    )
    found.add_argument("--json", action="store_true", help="print one JSON object, for scripts")
    return found


def main(argv: list[str]) -> int:
    """Return 0 if all runs have the same bits, 1 if not, 2 if the script cannot be run."""
    options = parser().parse_args(argv)
    if not options.script:
        raise UserError("there is no script to check: name one, as in `holdfast check train.py`")
    check_present(script_of(options))
    if options.virtual < WORKERS:
        raise UserError(f"--virtual {options.virtual} is too few for {WORKERS} workers")
    if options.procs_per_worker < 1:
        raise UserError(f"--procs-per-worker {options.procs_per_worker}: give 1 or more")
    if options.steps <= KILL_STEP:
        raise UserError(f"--steps {options.steps} is too few: give more than {KILL_STEP}")
    if not 0 < options.timeout < float("inf"):
        raise UserError(f"--timeout {options.timeout:g}: give a number of seconds above 0")
    console = PlainConsole(stderr=options.json, markup=True)
    try:
        with temporary_folder("check-") as directory:
            runs, findings, steps = check(options, directory, console)
    except KeyboardInterrupt:
        print_plain("stopped", file=sys.stderr)
        return 130
    except OSError as error:
        raise UserError(
            f"the runs cannot be recorded in {tempfile.gettempdir()}: {error.strerror}; "
            "make room there, or set TMPDIR to another folder"
        ) from None
    if options.json:
        print_plain(json.dumps(to_dict(runs, findings, steps), indent=2))
    else:
        report(runs, findings, steps, console)
    return 1 if findings or any(run.problem or run.told for run in runs) else 0


def check(
    options: argparse.Namespace, directory: Path, console: PlainConsole
) -> tuple[list[TracedRun], list[Divergence], int]:
    """Run the script three times, and compare. Returns the runs, what differs, and the steps."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        killed = run_once(options, directory, bar, WORKERS, KILL_STEP)
        joined = step_of_join(killed.states, 1)
        check_enough_steps(killed, joined)
        calm = [run_once(options, directory, bar, count, None) for count in (1, WORKERS)]
    runs = [*calm, killed]
    steps = min(each.steps for each in runs)
    return runs, compare(runs, steps), steps


def run_once(
    options: argparse.Namespace, directory: Path, bar: Progress, workers: int, kill: int | None
) -> TracedRun:
    """Run the script until it has taken enough steps, or ends."""
    name = f"{workers} worker{'s' * (workers > 1)}"
    name += f", one killed in step {kill}" if kill is not None else ""
    place = directory / name.replace(" ", "-").replace(",", "")
    traces = place / "traces"
    traces.mkdir(parents=True)
    plan = place / "plan.json"
    plan.write_text(json.dumps({"traces": str(traces), "kill_step": kill}))
    task = bar.add_task(name)
    sizes = ["--nproc", str(workers), "--virtual", str(options.virtual)]
    sizes += ["--procs-per-worker", str(options.procs_per_worker)]
    script = (TRACED, str(plan), script_of(options), *options.args)
    until = time.monotonic() + options.timeout
    with LocalRun(place / "run", (*sizes, *GUARD), script, bound=True) as run:
        while run.is_running() and not _is_enough(traces, options.steps, kill):
            if time.monotonic() >= until:
                raise UserError(
                    f"the run on {name} took no {options.steps} steps in {options.timeout:g} s: "
                    "give --timeout more, or the script less to do"
                )
            time.sleep(POLL_S)
        ended = not run.is_running()
        code = run.wait(options.timeout) if ended else 0
        said = [line for line in run.err if str(directory) not in line]  # it will be gone
        problem = ""
        if code:
            _check_room(directory)
            ending = f"the run has ended with exit status {code}"
            problem = run.run_dir.outcome() or "\n".join(said[-12:]) or ending
        events = run.events()
    bar.update(task, completed=1, total=1)
    texts = [event["text"] for event in events if event["kind"] == "script"]
    texts += [event["text"] + ONE_MACHINE for event in events if event["kind"] == "wrong"]
    found = TracedRun(name=name, states=read_traces(traces), told=list(dict.fromkeys(texts)))
    return replace(found, problem=problem)


def _check_room(directory: Path) -> None:
    """Raise OSError if the disk is full, which is why a run has failed then."""
    (directory / "room").write_bytes(bytes(ROOM_BYTES))


def _is_enough(traces: Path, steps: int, kill: int | None) -> bool:
    states = read_traces(traces)
    done = max((max(each, default=0) for each in states.values()), default=0)
    if kill is None:
        return done >= 2 * steps
    joined = step_of_join(states, 1)
    return joined is not None and done >= max(joined + STEPS_AFTER_JOIN, steps)


def report(
    runs: Sequence[TracedRun], findings: Sequence[Divergence], steps: int, console: PlainConsole
) -> None:
    """Print the findings, for people."""
    unlike = {each.run: each for each in findings}
    for run in runs:
        if run.problem:
            says = "[red]failed[/red]"
        elif run.name in unlike:
            says = f"[red]other bits from step {unlike[run.name].step} on[/red]"
        elif run.told:
            says = f"[red]the same bits in {steps} steps, but see below[/red]"
        else:
            says = f"[green]the same bits in {steps} steps[/green]"
        console.print(f"{run.name:<32} {says}", highlight=False)
    for text in dict.fromkeys(text for run in runs for text in said_of(run)):
        names = [run.name for run in runs if text in said_of(run)]
        whose = "all runs" if len(names) == len(runs) else "; ".join(names)
        console.print(f"\n{whose}: {text}", highlight=False, markup=False)
    for each in findings:
        text = f"\n{each.run}: {each.path} is the first to differ, before step {each.step}."
        console.print(f"{text} Likely {each.cause}.", highlight=False, markup=False)
    if not findings and not any(run.problem or run.told for run in runs):
        console.print(
            f"\nThis script keeps the promise in its first {steps} steps. Lines that run later, "
            "perhaps those after an epoch, were not tried: --steps N goes further.",
            soft_wrap=True,
        )


def said_of(run: TracedRun) -> tuple[str, ...]:
    """Return the reason that a run failed: the script's fault, and the guard's findings."""
    return (run.problem, *run.told) if run.problem else tuple(run.told)


def to_dict(runs: Sequence[TracedRun], findings: Sequence[Divergence], steps: int) -> dict:
    """Return the same for scripts."""
    names = ("name", "told", "problem")
    return {
        "steps": steps,
        "same": not findings and not any(run.problem for run in runs),
        "runs": [{name: getattr(run, name) for name in names} for run in runs],
        "findings": [asdict(each) for each in findings],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRun:
    """Describes one run of the script. `problem`: why it ended; "" if it went well."""

    name: str
    #: The states by worker and incarnation.
    states: dict[str, States]
    #: Events of the job about the script.
    told: Sequence[str]
    problem: str = ""

    @property
    def steps(self) -> int:
        """Return the number of steps at which some worker has written down its state."""
        return max((max(each, default=-1) + 1 for each in self.states.values()), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Names the place where a run first differs from the first run of all."""

    run: str
    step: int
    path: str
    cause: str


def read_traces(directory: Path) -> dict[str, States]:
    """Read what the workers of a run have written down."""
    found: dict[str, States] = {}
    for path in sorted(directory.glob("*.jsonl")):
        lines = path.read_text().splitlines()
        entries = [json.loads(line) for line in lines if line.endswith("}")]
        found[path.stem] = {entry["step"]: entry["tensors"] for entry in entries}
    return found


def compare(runs: Sequence[TracedRun], steps: int) -> list[Divergence]:
    """Compare each run with the first one, in their first `steps` steps."""
    reference = next(iter(runs[0].states.values()), {})
    found: list[Divergence] = []
    for run in runs:
        first = min(
            (
                (step, path)
                for states in run.states.values()
                for step, state in states.items()
                if step < steps
                for path in _first_difference(reference.get(step), state)
            ),
            key=lambda place: place[0],
            default=None,
        )
        if first is not None:
            step, path = first
            cause = START if step == 0 else _cause(run, runs, found)
            found.append(Divergence(run=run.name, step=step, path=path, cause=cause))
    return found


def _cause(run: TracedRun, runs: Sequence[TracedRun], found: Sequence[Divergence]) -> str:
    alone_differs = any(each.run != run.name for each in found)
    return DIFFERS_BY_WORKER if alone_differs or run is not runs[-1] else LACKS_AT_JOIN


def _first_difference(one: Mapping[str, str] | None, other: Mapping[str, str]) -> list[str]:
    if one is None:
        return []
    paths = [*one, *(path for path in other if path not in one)]
    return [path for path in paths if one.get(path) != other.get(path)][:1]


def step_of_join(states: Mapping[str, Any], worker: int) -> int | None:
    """Return the first step that the second incarnation of a worker has taken part in."""
    found: Any = states.get(f"{worker}-2")
    return min(found) if found else None


def check_enough_steps(run: TracedRun, joined: int | None) -> None:
    """Check that a killed worker has come back. UserError names the next action if it has not."""
    if not run.problem and joined is None:
        raise UserError(
            f"the script ended after {run.steps} steps, before the worker that was killed had "
            "joined again: let it train for more steps"
        )
