"""Count the walks of docs/architecture.md: `python docs/count_walks.py [--check | --write]`.

Small jobs run in real processes, and each thread records which functions of Holdfast it calls. A
walk is a list of stations: functions that are called one after the other, each in the thread that
has the work at that time. The rooms of a walk are the modules on the way: the modules of the
stations, and of all functions that have called a station and have not returned yet. A hop leads
from one room to the next. Needs Python 3.11: in older ones a call does not name
the class of its method.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests"
PAGE = HERE / "architecture.md"
PACKAGE = str(HERE.parent / "src" / "holdfast") + os.sep
LIBRARIES = tuple({sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "purelib", "platlib")})
# Names the folder where all processes record their calls.
VARIABLE = "HOLDFAST_WALKS"
RUN_S = 240.0
NODE = "other"

SCRIPT = """
import os, sys, time, torch, holdfast
job = holdfast.join()
model = torch.nn.Linear(30, 30)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job.protect(model=model, optimizer=optimizer)
data = job.batches(torch.utils.data.TensorDataset(torch.ones(64, 30)), batch_size=4)
for step in job.steps(data, until=100_000):
    for (x,) in step:
        step.backward((model(x) - 1).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    if job.is_leader and os.path.exists(sys.argv[1]):
        job.stop()
    time.sleep(0.05)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """Names the stations of a walk. Each turn is in one thread, and hands the work to the next."""

    name: str
    text: str  # where it begins and ends
    turns: Sequence[Sequence[str]]


OPINION = (
    *("StepMachine._vote", "Saves.opinion", "Feeding.opinion", "Replicating.opinion"),
    *("Vote.row", "Standing.order"),
)
DECISION = (
    *("Engine._gather", "all_gather", "TcpTransport.exchange", "StepMachine._handle_votes"),
    *("Counting.count", "count_votes", "WorkerMachine._commit_step"),
)
WALKS = (
    Walk(
        name="A vote",
        text="from a worker's opinion to the commit",
        turns=(OPINION, DECISION),
    ),
    Walk(
        name="A gradient",
        text="from autograd to `.grad`",
        turns=(
            ("Gradients._hook.<locals>.handle_gradient", "FilledBuckets.note"),
            ("BucketSum.begin", "TcpTransport.exchange", "BucketSum.advance"),
            ("StepMachine.handle_sums", "Standing.order"),
            OPINION,
            DECISION,
            ("StepRunner.finish", "Gradients.publish"),
        ),
    ),
    Walk(
        name="A share of a checkpoint",
        text="from the decision to the news that it is durable",
        turns=(
            ("Copies.copy_next", "Saves.next_copy"),
            (
                *("Driver.next_for_script", "StateMover.copy", "Saver.copy"),
                *("StateShare.copy", "snapshot:send"),
            ),
            ("Writer._carry_out", "Checkpoints.begin", "Saving.write", "Saving.commit"),
            ("Saves.record_end",),
        ),
    ),
    Walk(
        name="A piece of the state, into a node's memory",
        text="from the decision to the memory that outlives the worker",
        turns=(
            ("Copies.copy_next", "Replicating.next_copy"),
            ("Driver.next_for_script", "StateMover.copy", "Replicator.copy"),
            ("Replicator._make_state", "PieceCoder.make", "PieceArena.put"),
        ),
    ),
    Walk(
        name="A recall",
        text="from the coordinator's decision to the state from the nodes' memory that is loaded",
        turns=(
            ("NextView._begin", "Protection.recall", "make_view"),
            ("CoordinatorServer._save", "FileJournal.save"),
            ("CoordinatorServer._save", "CoordinatorServer._carry_out", "Channel.send"),
            ("AgentServer._feed", "AgentMachine._forward", "WorkerProcess.send"),
            ("AgentLink._receive", "Membership.enter", "Driver._carry_out"),
            (
                "StateMover.carry_out",
                "Recalling.load_state",
                "PieceReader.read",
                "LoadedState.load",
            ),
        ),
    ),
    Walk(
        name="`holdfast migrate`",
        text="from the command to the view without the worker that leaves",
        turns=(
            (
                "order_commands:run_migrate",
                "contact:migrate",
                "contact:ask",
                "Channel.send",
            ),
            ("CoordinatorServer._pass_on", "Channel.send"),
            ("AgentServer._feed", "MoveOrders.ask", "AgentServer._carry_out", "Channel.send"),
            ("LiveRoster.hear", "plan_change", "choose_change", "Channel.send"),
            ("AgentServer._feed", "AgentMachine._forward", "WorkerProcess.send"),
            ("AgentLink._receive", "Membership.heed"),
            OPINION,
            (*DECISION, "Membership.announce_end"),
            ("Membership.promise_at_rest", "AgentLink.tell"),
            ("AgentServer._on_message", "AgentMachine._handle_status", "Channel.send"),
            ("LiveRoster.hear", "NextView.plan", "propose_view", "make_view"),
            ("CoordinatorServer._save", "FileJournal.save"),
            ("CoordinatorServer._save", "CoordinatorServer._carry_out", "Channel.send"),
        ),
    ),
    Walk(
        name="`holdfast launch yarn`",
        text="from the command to the first container that the fleet asks for",
        turns=(
            (
                *("main:main", "find_launcher", "launch_yarn:check_cluster", "RestLink.ask"),
                *("make_run_dir", "YarnManager.create", "launch_cluster_job", "Supervisor.run"),
            ),
            ("fleet_process:main", "read_plan", "FleetMachine.handle"),
            ("FleetDriver._request", "YarnManager.request", "OrderBook.add"),
        ),
    ),
)
STATIONS = {station for walk in WALKS for turn in walk.turns for station in turn}


# ---------------------------------------------------------------- in each process of a job


class CallRecorder:
    """Writes the calls of stations in this process to a file, each with the calls around it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Each function's module and name; "" for functions outside of Holdfast.
        self._names: dict[CodeType, str] = {}
        # The process and its descriptor: after a fork there is another process.
        self._file: tuple[int, int] = (0, -1)

    def record_all(self) -> None:
        """Record the calls of all threads from now on."""
        threading.setprofile(self._record)
        sys.setprofile(self._record)

    def _record(self, frame: FrameType, event: str, arg: object) -> None:
        if event != "call":
            return
        name = self._name(frame.f_code)
        if not is_station(name):
            return
        calls = [name, *self._callers(frame)]
        line = f"{time.monotonic_ns()} {threading.get_ident()} {' '.join(reversed(calls))}\n"
        if self._file[0] != os.getpid():
            path = self._folder / f"{os.getpid()}.calls"
            self._file = os.getpid(), os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(self._file[1], line.encode())

    def _callers(self, frame: FrameType) -> Iterator[str]:
        """List the calls around this one, the innermost first, up to the script or event loop."""
        caller = frame.f_back
        while caller is not None:
            path = caller.f_code.co_filename
            if name := self._name(caller.f_code):
                yield name
            elif not path.startswith(LIBRARIES) or path.endswith(("asyncio/events.py", "runpy.py")):
                return
            caller = caller.f_back

    def _name(self, code: CodeType) -> str:
        if code not in self._names:
            is_ours = code.co_filename.startswith(PACKAGE)
            module = code.co_filename.removeprefix(PACKAGE).removesuffix(".py")
            self._names[code] = f"{module}:{code.co_qualname}" if is_ours else ""
        return self._names[code]


def is_station(name: str) -> bool:
    """Return whether a function is a station of any walk."""
    return any(station in STATIONS for station in station_names(name))


def station_names(name: str) -> tuple[str, str]:
    """Return the two names that a walk may use for a function: with and without its module."""
    path, _, function = name.partition(":")
    return function, f"{path.rpartition('/')[2]}:{function}"


# ---------------------------------------------------------------- what the processes have recorded


@dataclass(frozen=True, slots=True)
class Call:
    """Describes one call of a station."""

    at: int
    thread: tuple[int, int]  # process and thread
    calls: tuple[str, ...]  # the calls around it, the outermost first, and itself

    def is_of(self, station: str) -> bool:
        return station in station_names(self.calls[-1])


def read_calls(folder: Path) -> list[Call]:
    """Return the calls of all processes, by time."""
    found = []
    for path in folder.glob("*.calls"):
        for line in path.read_text().splitlines():
            at, thread, *calls = line.split()
            found.append(Call(int(at), (int(path.stem), int(thread)), tuple(calls)))
    return sorted(found, key=lambda call: call.at)


def find_turns(walk: Walk, calls: Sequence[Call]) -> list[list[Call]]:
    """Find the first time that a job takes a walk: the calls of the stations of each turn."""
    turns: list[list[Call]] = []
    at = 0
    for stations in walk.turns:
        later = [call for call in calls if call.at > at]
        turns.append(find_turn(walk.name, stations, later))
        at = turns[-1][-1].at
    return turns


def find_turn(name: str, stations: Sequence[str], calls: Sequence[Call]) -> list[Call]:
    """Return the first calls of these stations, in order and in one thread."""
    begun: dict[tuple[int, int], list[Call]] = {}
    longest = 0
    for call in calls:
        reached = begun.setdefault(call.thread, [])
        if call.is_of(stations[len(reached)]):
            reached.append(call)
        elif call.is_of(stations[0]):
            reached[:] = [call]
        longest = max(longest, len(reached))
        if len(reached) == len(stations):
            return reached
    raise SystemExit(f"{name}: no call of {stations[longest]}, in a turn of {', '.join(stations)}")


def find_rooms(turns: Sequence[Sequence[Call]]) -> list[list[str]]:
    """Return the rooms of each turn in the order of the walk."""
    rooms = []
    for number, turn in enumerate(turns):
        way: list[str] = []
        around: tuple[str, ...] = () if number else turn[0].calls[:-1]
        for call in turn:
            pairs = enumerate(itertools.zip_longest(around, call.calls))
            first = next((at for at, (old, new) in pairs if old != new), len(call.calls))
            around = call.calls
            for name in call.calls[first:]:
                room = name.partition(":")[0]
                if way[-1:] != [room]:
                    way.append(room)
        rooms.append(way)
    return rooms


# ---------------------------------------------------------------- the jobs


@contextlib.contextmanager
def recording() -> Iterator[Path]:
    """Yield a folder where all processes that start from now on record their calls."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        text = f"import sys\nsys.path.append({str(HERE)!r})\nimport count_walks\n"
        text += f"count_walks.CallRecorder(count_walks.Path({made!r})).record_all()\n"
        text += f"sys.path.remove({str(HERE)!r})\n"
        (folder / "sitecustomize.py").write_text(text)
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (made, before)))
        try:
            yield folder
        finally:
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before


def run_jobs(folder: Path) -> None:
    """Run the jobs whose processes take all walks."""
    sys.path.insert(0, str(TESTS))
    from holdfast.engine.runtime.local_run import LocalRun, strike
    from labs.fake_yarn import FakeYarn
    from labs.local_nodes import LocalNodes

    script, stop = folder / "script.py", folder / "stop"
    script.write_text(SCRIPT)
    words = [str(script), str(stop)]
    common = ["--nproc", "2", "--virtual", "2", "--redundancy", "replicate:1"]
    common += ["--nodes-max", "2", "--protect-every", "2", "--join-pause", "0"]
    common += ["--store", str(folder / "store"), "--save-every", "5"]
    with LocalRun(folder / "run", common, words) as run, LocalNodes(run) as nodes:
        run.until_members(2, RUN_S)
        nodes.add(NODE, "--nproc", "1")

        def is_waiting() -> bool:
            workers = run.status()["workers"]
            return any(each["agent"] == NODE and each["state"] == "spare" for each in workers)

        run.until(is_waiting, RUN_S, f"a worker waits on {NODE}")
        command = [sys.executable, "-m", "holdfast.cli.main", "migrate", str(folder / "run")]
        subprocess.run([*command, "1", "--to", NODE], check=True, timeout=RUN_S)
        run.until(lambda: run.status()["memory"]["step"] > 0, RUN_S, "the memory holds a state")
        views = len(run.events("view"))
        for pid in run.members().values():
            strike(pid)
        run.until(lambda: len(run.events("view")) > views, RUN_S, "the job begins again")
        run.until_members(2, RUN_S)
        stop.touch()
        run.wait(RUN_S)
    with FakeYarn(folder / "yarn", hosts=1) as yarn:
        command = ["launch", "yarn", "--rm", yarn.url, "--run-dir", str(folder / "launched")]
        stop.unlink()
        with LocalRun(folder / "launched", ["--nodes", "1"], words, command=command) as run:
            run.until_members(1, RUN_S)
            stop.touch()
            run.wait(RUN_S)


# ---------------------------------------------------------------- the page


def draw(walks: Sequence[tuple[Walk, Sequence[Sequence[str]]]]) -> Iterator[str]:
    """Draw the table of all walks, and then each walk with a line for each turn."""
    yield "| walk | rooms | hops |"
    yield "|---|---|---|"
    for walk, turns in walks:
        rooms = [room for turn in turns for room in turn]
        hops = sum(one != following for one, following in itertools.pairwise(rooms))
        yield f"| {walk.name}, {walk.text} | {len(set(rooms))} | {hops} |"
    for walk, turns in walks:
        yield ""
        yield f"**{walk.name}**, {walk.text}:"
        yield ""
        for number, turn in enumerate(turns, 1):
            yield f"{number}. {' -> '.join(f'`{room}`' for room in turn)}"


def drawn(text: str, body: str) -> str:
    """Return the page with its table and its walks drawn again."""
    # Not above: the processes of a job that is traced import this module, too.
    from draw_protocol import replace_section

    return replace_section(text, "walks", body)


def main() -> int:
    parser = argparse.ArgumentParser(description="Count the walks of docs/architecture.md.")
    parser.add_argument("--check", action="store_true", help="fail if the page shows others")
    parser.add_argument("--write", action="store_true", help="update the page")
    options = parser.parse_args()
    with recording() as folder:
        run_jobs(folder)
        calls = read_calls(folder)
    body = "\n".join(draw([(walk, find_rooms(find_turns(walk, calls))) for walk in WALKS]))
    old = PAGE.read_text()
    new = drawn(old, body)
    if options.check:
        return int(old != new)
    if options.write:
        PAGE.write_text(new)
    else:
        sys.stdout.write(f"{body}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
