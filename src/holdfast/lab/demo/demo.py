"""Trains a small GPT through faults, then undisturbed, and compares the two: `holdfast demo`.

The demo is a user of the test kit: it starts runs as a user would, disturbs one of them from
outside and trusts only the files on the disk afterwards. It reads and prints; it does not train
itself.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import itertools
import json
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from holdfast.engine.commands.plain_console import PlainConsole
from holdfast.engine.core.errors import HoldfastError, UserError, WorldError
from holdfast.engine.net.standard_streams import print_plain
from holdfast.engine.plugins import find_command
from holdfast.engine.records.ledger import LEDGER_DIR
from holdfast.engine.records.ledger_audit import LedgerReport, verify
from holdfast.engine.records.summary import describe_workers
from holdfast.engine.runtime.local_run import ACTIVE, LocalRun
from holdfast.engine.train.data.sampling import plan_of
from holdfast.lab.demo import fault_kit

SCRIPT = "holdfast.lab.demo.gpt"
VIRTUAL_RANKS = 4
STEPS_MIN = 10
STEPS_MAX = 20_000  # never reached unless steps take milliseconds
STOP = "stop"  # in the run's directory: this file ends the training script
# Without --steps, the faulty run ends after all faults, and not before one of these is reached:
STEPS_AIM = 160
TRAIN_S = 30.0
STRIKES_S = 90.0  # on a slow machine, no second fault is struck later than this
RECOVERY_S = 60.0  # nor is a recovery waited for any longer than this after it
REST_STEPS = 20  # between two faults, and after the last
RESTS = 8  # in the number of steps that --steps gives
POLL_S = 0.1
POLL_DUE_S = 0.03  # while a fault waits for its victims: joining takes a few of these
#: A slow run prints a line this often.
SILENCE_S = 10.0
DIGEST_CHARS = 16  # two cut digests fit in a row of 80 columns
END_S = 60.0  # from the last step to the end of every process
COMMIT = re.compile(r"step (\d+) loss (\S+) time (\S+)")
# These are about the speed of this machine, which the demo is not about.
ASIDE = ("slow", "straggler", "busy", "balance", "copy")
COLOURS = {"lost": "red", "view": "green", "join": "cyan", "failed": "bold red"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Keeps the results of one run."""

    run_dir: Path
    workers: int
    seconds: float
    #: SHA-256 of all parameters and optimizer state, printed by the script.
    digest: str
    #: By step: the loss as hexadecimal digits, so that every bit counts.
    losses: dict[int, str]
    ledger: LedgerReport
    commits: list[fault_kit.StepEnd]
    events: list[dict[str, Any]]
    sample: str

    @property
    def step_s(self) -> float:
        """Return the median time of a step."""
        times = [c.time for c in self.commits]
        return statistics.median(b - a for a, b in itertools.pairwise(times))


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Compares both runs. `problems` is empty if the results are equal and complete."""

    steps: int
    faulty: Trained
    calm: Trained
    problems: list[str]
    recoveries: list[fault_kit.Recovery]
    #: Faults that were left out, or struck too late to be measured.
    missed: list[fault_kit.PlannedFault]
    plot: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """Describes the length of a run and its faults.

    `steps`: None for a run that trains until `end` is called.
    """

    title: str
    workers: int
    steps: int | None
    schedule: tuple[fault_kit.PlannedFault, ...] = ()


class Screen:
    """Shows a live bar with events above it, or plain lines when not on a terminal."""

    def __init__(self, console: PlainConsole) -> None:
        self.console = console
        self._progress: Progress | None = None
        self._task: Any = None
        self._line = 0  # the last step with a line of its own
        self._started = self._said = 0.0

    @contextlib.contextmanager
    def training(self, title: str, steps: int | None) -> Iterator[None]:
        """Show one run, of `steps` steps if that is known."""
        self.say(f"[bold]{title}[/bold]", stamp=False)
        self._started, self._line = time.monotonic(), 0
        columns = (
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("steps  loss {task.fields[loss]}  {task.fields[alive]} workers"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self.console, disable=not self.console.is_terminal) as bar:
            self._progress = bar
            self._task = bar.add_task("", total=steps, loss="-", alive=0)
            yield
        self._progress = None

    def show(self, step: int, steps: int | None, loss: float, alive: int) -> None:
        """Show that `step` steps are done."""
        assert self._progress is not None
        self._progress.update(
            self._task, completed=step, loss=f"{loss:.4f}" if step else "-", alive=alive
        )
        lines_apart = max(1, (steps or STEPS_AIM) // 10)
        is_due = step // lines_apart > self._line // lines_apart
        is_news = step > self._line or not step
        is_due |= is_news and time.monotonic() >= self._said + SILENCE_S
        if is_due and not self.console.is_terminal:
            self._line = step
            of = f" of {steps}" if steps else ""
            text = f"step {step}{of}, loss {loss:.4f}" if step else "starting"
            self.say(f"{text}, {alive} workers")

    def say(self, text: str, *, stamp: bool = True) -> None:
        """Print a line that stays."""
        self._said = time.monotonic()
        at = f"[dim]{self._said - self._started:6.1f} s[/dim]  " if stamp else ""
        self.console.print(at + text, highlight=False, soft_wrap=True)


def main(argv: list[str]) -> int:
    """Return 0 if both runs are equal, 1 if anything differs, 2 if one failed."""
    options = parser().parse_args(argv)
    if options.workers < 2:
        raise UserError(
            f"--workers {options.workers}: faults need at least 2, so that one survives"
        )
    if options.steps is not None and options.steps < STEPS_MIN:
        raise UserError(f"--steps {options.steps}: faults and recoveries need at least {STEPS_MIN}")
    out = options.out or Path("holdfast-demo") / time.strftime("%Y%m%d-%H%M%S")
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)  # treat it like Ctrl-C
    console = PlainConsole(stderr=options.json, markup=True)
    try:
        proof = prove(options, out, Screen(console))
    except KeyboardInterrupt:
        console.print(f"stopped; what the runs have written is in {out}")
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)
    if options.json:
        print_plain(json.dumps(to_dict(proof, options.seed), indent=2))
    else:
        report(proof, console, is_open=options.steps is None)
    return 1 if proof.problems else 0


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="holdfast demo",
        description="Train a small GPT on Python's own source code while workers are killed and "
        "frozen, then again undisturbed, and prove that both runs are the same, bit for bit.",
    )
    found.add_argument(
        "--workers", type=int, default=4, help="workers of the faulty run (default 4)"
    )
    found.add_argument(
        "--steps",
        type=int,
        help="steps of each run (default: as many as all faults take on this machine)",
    )
    found.add_argument(
        "--seed", type=int, default=0, help="seed of the job, and of the choice of victims"
    )
    found.add_argument(
        "--out", type=Path, help="directory for both runs (default: holdfast-demo/TIME)"
    )
    found.add_argument("--json", action="store_true", help="print one JSON object, for scripts")
    found.add_argument("args", nargs="*", help="arguments for the training script, after --")
    return found


def prove(options: argparse.Namespace, out: Path, screen: Screen) -> Proof:
    """Run both and compare them."""
    virtual = max(VIRTUAL_RANKS, options.workers)
    calm_workers = max(1, options.workers // 2)
    rest_steps = REST_STEPS if options.steps is None else max(1, options.steps // RESTS)
    schedule = fault_kit.schedule(rest_steps, options.workers, options.seed)
    title = f"1. A small GPT on {options.workers} workers for {virtual} virtual ranks"
    title += f", with {len(schedule)} faults" if options.steps is None else ", with faults"
    plan = RunPlan(title=title, workers=options.workers, steps=options.steps, schedule=schedule)
    faulty, striker = train(out / "faulty", plan, options, screen)
    steps = max((c.step + 1 for c in faulty.commits), default=0)
    title = f"2. The same {steps} steps undisturbed, on {describe_workers(calm_workers)}"
    title += f" instead of {options.workers}"
    plan = RunPlan(title=title, workers=calm_workers, steps=steps)
    calm, _ = train(out / "undisturbed", plan, options, screen)
    found = [fault_kit.recovery(s, faulty.events, faulty.commits) for s in striker.strikes]
    late = [s.fault for s, r in zip(striker.strikes, found, strict=True) if r is None]
    recoveries = [r for r in found if r is not None]
    problems = compare(faulty, calm, options.steps or steps)
    if not recoveries:
        more = "" if options.steps is None else ": give more --steps, or none"
        problems.append(f"no fault was struck in the run's {steps} steps{more}")
    plot = draw(faulty, calm, striker.strikes, out / "losses.png")
    return Proof(
        steps=options.steps or steps,
        faulty=faulty,
        calm=calm,
        problems=problems,
        recoveries=recoveries,
        missed=late + striker.pending,
        plot=plot,
    )


# ---------------------------------------------------------------- running


def make_run(run_dir: Path, plan: RunPlan, options: argparse.Namespace) -> LocalRun:
    spec = importlib.util.find_spec(SCRIPT)  # found, not imported: it would import torch
    if spec is None or spec.origin is None:
        raise UserError(f"{SCRIPT} is missing from this installation: install holdfast again")
    virtual = max(VIRTUAL_RANKS, options.workers)
    flags = ["--nproc", str(plan.workers), "--virtual", str(virtual), "--seed", str(options.seed)]
    length = ["--steps", str(plan.steps or STEPS_MAX)]
    if plan.steps is None:
        length += ["--stop", str(run_dir / STOP)]
    script = [spec.origin, *length, "--print-every", "1", *options.args]
    return LocalRun(run_dir, flags, script, bound=True)


def train(
    run_dir: Path, plan: RunPlan, options: argparse.Namespace, screen: Screen
) -> tuple[Trained, fault_kit.Striker]:
    """Train once from start to end, striking the plan's faults when they are due."""
    run = make_run(run_dir, plan, options)
    started = time.monotonic()
    striker = fault_kit.Striker(run, plan.schedule)
    with screen.training(plan.title, plan.steps), run:
        watch(run, striker, plan, screen)
        code = run.wait(END_S)
    if code != 0:
        tail = "\n".join(run.err[-10:])
        raise WorldError(f"the run in {run.run_dir.path} failed (exit status {code}):\n{tail}")
    return collect(run, time.monotonic() - started), striker


def watch(run: LocalRun, striker: fault_kit.Striker, plan: RunPlan, screen: Screen) -> None:
    """Show the run until it ends, strike the faults, and end it in time."""
    told = step = workers = 0
    loss = float("nan")
    started, is_ending = time.monotonic(), False
    while True:
        going = run.is_running()  # asked first, so that the last lines are still seen
        now = time.monotonic()
        for line in reversed(run.out):
            if found := COMMIT.fullmatch(line):
                step, loss = int(found[1]) + 1, float(found[2])
                break
        seconds = now - started
        if plan.steps is None and not is_ending and is_over(striker, step, now, seconds):
            is_ending = True
            end(run)
        if not is_ending and has_room(striker, step, plan.steps, seconds):
            if done := striker.poll(step, now):
                screen.say(f"[bold yellow]step {step}: {done}[/bold yellow]")
        events = run.events()
        for event in events[told:]:
            if event["kind"] in ASIDE:
                continue
            colour = COLOURS.get(event["kind"], "default")
            screen.say(f"[{colour}]{event['text']}[/{colour}]")
        told = len(events)
        if not going:
            return
        workers = alive(run) or workers
        screen.show(step, plan.steps, loss, workers)
        time.sleep(POLL_DUE_S if striker.find_due(step, now) else POLL_S)


def has_room(striker: fault_kit.Striker, step: int, steps: int | None, seconds: float) -> bool:
    """Return whether a run of `steps` steps, or an open one, may still be struck."""
    if steps is not None:
        return step + fault_kit.SETTLED_STEPS < steps
    return not striker.strikes or seconds < STRIKES_S


def is_over(striker: fault_kit.Striker, step: int, now: float, seconds: float) -> bool:
    """Return whether a run that has taken `seconds` has shown what a demo can show.

    A slow machine is given time for one fault at least, and to recover from the last one.
    """
    is_late = seconds >= STRIKES_S
    if not striker.strikes or (striker.pending and not is_late):
        return False
    if striker.measure_rest(step, now) < REST_STEPS:
        return seconds >= STRIKES_S + RECOVERY_S
    return is_late or step >= STEPS_AIM or seconds >= TRAIN_S


def end(run: LocalRun) -> None:
    """Order the script to stop after its next step. It never sees half a file."""
    new = run.run_dir.path / f"{STOP}.new"
    new.write_text("0")
    new.rename(run.run_dir.path / STOP)


def alive(run: LocalRun) -> int:
    """Count workers that take part in steps, or will soon; 0 while no coordinator answers."""
    with contextlib.suppress(HoldfastError):
        return sum(w["state"] in (*ACTIVE, "changing view") for w in run.status()["workers"])
    return 0


def collect(run: LocalRun, seconds: float) -> Trained:
    path = run.run_dir.path
    lines = list(run.out)
    if not lines or not re.fullmatch("[0-9a-f]{64}", lines[-1]):
        raise WorldError(f"the run in {path} ended without a digest: see the logs there")
    found = [COMMIT.fullmatch(line) for line in lines]
    commits = [
        fault_kit.StepEnd(step=int(m[1]), loss=float(m[2]), time=float(m[3])) for m in found if m
    ]
    begin = max((i for i, line in enumerate(lines) if line == "sample:"), default=len(lines))
    return Trained(
        run_dir=path,
        workers=run.run_dir.spec().workers.nproc,
        seconds=seconds,
        digest=lines[-1],
        losses=read_losses(path),
        ledger=verify(path, plan_of),
        commits=commits,
        events=run.events(),
        sample="\n".join(lines[begin + 1 : -1]),
    )


def read_losses(run_dir: Path) -> dict[int, str]:
    """Read step -> its loss from the ledger. `verify` checks that all copies of a step agree."""
    losses: dict[int, str] = {}
    for path in sorted((run_dir / LEDGER_DIR).glob("*.jsonl")):
        for line in path.read_text(errors="replace").splitlines(keepends=True):
            if line.endswith("\n"):  # otherwise its writer died while writing it
                entry = json.loads(line)
                if entry["kind"] == "step":
                    losses.setdefault(entry["step"], entry["loss"])
    return losses


# ---------------------------------------------------------------- comparing


def compare(faulty: Trained, calm: Trained, steps: int) -> list[str]:
    """List everything in which the runs differ or fall short, one sentence each."""
    problems = []
    if faulty.digest != calm.digest:
        problems.append("the final digests differ")
    for trained in (faulty, calm):
        missing = missing_steps(trained, steps)
        if missing:
            problems.append(f"{trained.run_dir}: {len(missing)} steps lost, first {missing[0]}")
        problems += [f"{trained.run_dir}: {text}" for text in trained.ledger.findings]
        if not trained.ledger.ok:
            problems.append(f"{trained.run_dir}: the ledger does not prove every sample once")
    both = [s for s in range(steps) if s in faulty.losses and s in calm.losses]
    unequal = [s for s in both if faulty.losses[s] != calm.losses[s]]
    if unequal:
        problems.append(f"the losses differ at {len(unequal)} steps, first at step {unequal[0]}")
    return problems


def missing_steps(trained: Trained, steps: int) -> list[int]:
    return [step for step in range(steps) if step not in trained.losses]


def to_dict(proof: Proof, seed: int) -> dict[str, Any]:
    """Make the JSON object, with all facts of the report for people."""
    faulty, calm = proof.faulty, proof.calm
    return {
        "ok": not proof.problems,
        "problems": proof.problems,
        "seed": seed,
        "steps": proof.steps,
        "digests": {"faulty": faulty.digest, "undisturbed": calm.digest},
        "digests_equal": faulty.digest == calm.digest,
        "losses_equal": faulty.losses == calm.losses,
        "losses": [float.fromhex(faulty.losses[s]) for s in sorted(faulty.losses)],
        "steps_lost": len(missing_steps(faulty, proof.steps)),
        "samples_lost": faulty.ledger.lost,
        "samples_repeated": faulty.ledger.repeated,
        "ledger": faulty.ledger.to_dict(),
        "faults": [
            {
                "what": str(r.strike),
                "kind": r.strike.fault.kind.value,
                "workers": list(r.strike.victims),
                "after_step": r.strike.step,
                "causes": list(r.causes),
                "next_step_ms": round(r.next_step_s * 1e3, 1),
                "usual_step_ms": round(r.usual_step_s * 1e3, 1),
                "stall_ms": round(r.stall_s * 1e3, 1),
                "pause_ms": None if r.pause_s is None else round(r.pause_s * 1e3, 1),
            }
            for r in proof.recoveries
        ],
        "faults_missed": [str(fault) for fault in proof.missed],
        "runs": {
            name: {
                "run_dir": str(trained.run_dir),
                "workers": trained.workers,
                "seconds": round(trained.seconds, 1),
                "step_ms": round(trained.step_s * 1e3, 1),
            }
            for name, trained in (("faulty", faulty), ("undisturbed", calm))
        },
        "plot": str(proof.plot) if proof.plot else None,
        "sample": faulty.sample,
    }


# ---------------------------------------------------------------- showing


def explain_missed(proof: Proof, *, is_open: bool) -> str:
    """Explain in one sentence which faults there was no room for."""
    names = ", ".join(map(str, proof.missed))
    if is_open:
        return f"Left out, because this machine is busy: {names}."
    return f"{proof.steps} steps had no room for: {names}; without --steps the demo makes room."


def report(proof: Proof, console: PlainConsole, *, is_open: bool) -> None:
    """Print the report for people. `is_open`: without --steps."""
    faulty, calm = proof.faulty, proof.calm
    console.print("\n[bold]3. What the faults cost[/bold]")
    table = Table("after step", "fault", "what the job saw", box=None)
    for name in ("next step\nafter (ms)", "usual\nstep (ms)", "pause\n(s)"):
        table.add_column(name, justify="right")
    for r in proof.recoveries:
        times = [f"{s * 1e3:.0f}" for s in (r.next_step_s, r.usual_step_s)]
        times.append("-" if r.pause_s is None else f"{r.pause_s:.2f}")
        table.add_row(str(r.strike.step), str(r.strike), "\n".join(r.causes), *times)
    console.print(table)
    text = "pause: from the first sign of the fault to the next step, as in `holdfast explain`"
    console.print(f"[dim]{text}[/dim]")
    if proof.missed:
        console.print(f"[yellow]{explain_missed(proof, is_open=is_open)}[/yellow]")
    console.print("\n[bold]4. What the faults changed[/bold]")
    console.print(comparison(proof))
    console.print("\n[bold]What the model writes[/bold] (the same in both runs)")
    console.print(faulty.sample, markup=False, highlight=False)
    console.print()
    for what, path in (("faulty run", faulty.run_dir), ("undisturbed run", calm.run_dir)):
        console.print(f"{what}: {path}", highlight=False, soft_wrap=True)
    plot = proof.plot or "skipped, since matplotlib is not installed"
    for what in (f"plot: {plot}", f"report on the faulty run: {page_on(faulty)}"):
        console.print(what, highlight=False, soft_wrap=True)
    for problem in proof.problems:
        console.print(f"[bold red]{problem}[/bold red]", highlight=False, soft_wrap=True)
    if not proof.problems:
        lost = sum(len(r.strike.victims) for r in proof.recoveries)
        text = f"{lost} workers were lost during the run, and the model is the same, bit for bit."
        console.print(f"[bold green]{text}[/bold green]")


def page_on(run: Trained) -> str:
    """Write the page on a run; return where it is, or why there is none."""
    page = run.run_dir / "report.html"
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            find_command("report")([str(run.run_dir), "--output", str(page)])
    except UserError as error:
        return str(error)
    return str(page)


def describe_equality(is_equal: bool) -> str:
    return "[green]equal[/green]" if is_equal else "[red]DIFFERENT[/red]"


def comparison(proof: Proof) -> Table:
    """Make the table of both runs, side by side."""
    runs = (proof.faulty, proof.calm)
    table = Table("", box=None)
    for name in ("faulty", "undisturbed"):
        table.add_column(name, no_wrap=True)  # a narrow terminal cuts neither digest shorter
    table.add_column("", no_wrap=True)

    def row(what: str, show: Callable[[Trained], object], *, judged: bool = False) -> None:
        one, other = (str(show(trained)) for trained in runs)
        mark = describe_equality(one == other)
        table.add_row(what, one, other, mark if judged else "")

    row("workers at the start", lambda t: t.workers)
    row("workers lost", lambda t: sum(e["kind"] == "lost" for e in t.events))
    row("seconds, with start-up", lambda t: f"{t.seconds:.0f}")
    row("median step (ms)", lambda t: f"{t.step_s * 1e3:.0f}")
    cut = (f"{t.digest[:DIGEST_CHARS]}..." for t in runs)
    mark = describe_equality(proof.faulty.digest == proof.calm.digest)
    table.add_row("SHA-256 of the final state", *cut, mark)
    last = proof.steps - 1
    row("last loss", lambda t: float.fromhex(t.losses.get(last, "nan")), judged=True)
    mark = describe_equality(proof.faulty.losses == proof.calm.losses)
    table.add_row("losses, every bit", *(f"{len(t.losses)} steps" for t in runs), mark)
    row("samples used", lambda t: t.ledger.samples, judged=True)
    row("samples lost", lambda t: t.ledger.lost, judged=True)
    row("samples repeated", lambda t: t.ledger.repeated, judged=True)
    row("steps lost", lambda t: len(missing_steps(t, proof.steps)), judged=True)
    return table


def draw(
    faulty: Trained, calm: Trained, strikes: list[fault_kit.Strike], path: Path
) -> Path | None:
    """Plot both loss curves, the faults, and the difference; None without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError:
        return None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    curves = []
    for trained in (faulty, calm):
        steps = sorted(trained.losses)
        curves.append((steps, [float.fromhex(trained.losses[s]) for s in steps]))
    figure, (top, bottom) = plt.subplots(
        2, 1, sharex=True, figsize=(9, 6), height_ratios=(4, 1), layout="constrained"
    )
    top.plot(*curves[1], color="#9ecae1", linewidth=5, label=f"undisturbed, {calm.workers} workers")
    label = f"with faults, {faulty.workers} workers"
    top.plot(*curves[0], color="#08306b", linewidth=1.2, label=label)
    for strike in strikes:
        for axis in (top, bottom):
            axis.axvline(strike.step, color="#cb181d", linewidth=0.8, linestyle="--")
        top.annotate(
            str(strike),
            (strike.step, 1),
            (3, -3),
            rotation=90,
            va="top",
            fontsize=7,
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            color="#cb181d",
        )
    top.set_ylabel("loss")
    top.set_title("The same job twice", loc="left")
    top.legend(ncols=2, loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
    shared = [s for s in curves[0][0] if s in calm.losses]
    both = [[float.fromhex(t.losses[s]) for s in shared] for t in (faulty, calm)]
    bottom.plot(shared, [a - b for a, b in zip(*both, strict=True)], color="#08306b")
    bottom.set_ylabel("difference")
    bottom.set_xlabel("step")
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
