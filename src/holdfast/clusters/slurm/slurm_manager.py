"""Submits a job to Slurm, and gets its nodes there: `holdfast launch slurm`.

Nodes come from the job's own allocation first, then from further jobs. An agent in the allocation
is a step of its own, so that it can be ended and replaced alone; each further job has one node.
Names of steps and jobs are the placements' ids. Only the requests under way are remembered.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.clusters.slurm.slurm_batch import (
    JOBS,
    NODE,
    NODES,
    NONE,
    PREEMPTION,
    STEPS,
    SbatchOptions,
    SlurmJob,
    SlurmNode,
    SlurmStep,
    clean_environment,
    escape_pattern,
    job_script,
    read_jobs,
    read_leaf_switch,
    read_nodes,
    read_options,
    read_problem,
    read_steps,
)
from holdfast.engine.commands.launch_command import launch_parser, make_run_dir, prefer
from holdfast.engine.core.errors import Refused, Unreachable, UserError
from holdfast.engine.core.fleet.placements import Holding, Notice, Placement, PlacementId
from holdfast.engine.core.job_spec import JobSpec
from holdfast.engine.fleet.cluster_manager import (
    FleetPlan,
    PlacementOrder,
    StoppedByOperator,
    job_prefix,
    read_plan,
)
from holdfast.engine.net.standard_streams import print_line, print_plain
from holdfast.engine.runtime.rundir import RunDir

# Slurm kills a cancelled step after KillWait, by default 30 s.
STALE_S = 40.0


@dataclass(frozen=True, slots=True)
class _Cancelled:
    name: str
    at: float


class StepEnds:
    """Remembers the steps that were cancelled, and the sruns that started steps.

    Slurm lists a step that ended while slurmctld was away for ever.
    """

    def __init__(self) -> None:
        self._sruns: dict[str, subprocess.Popen[bytes]] = {}  # by the name of the step
        self._cancelled: dict[str, _Cancelled] = {}  # by the id of the step

    def record_start(self, name: str, srun: subprocess.Popen[bytes]) -> None:
        self._sruns[name] = srun

    def record_cancel(self, id_: str, name: str, now: float) -> None:
        """Record that a step is cancelled; the first time counts."""
        self._cancelled.setdefault(id_, _Cancelled(name, now))

    def has_ended(self, step: SlurmStep, now: float) -> bool:
        """Return whether a step that is listed was cancelled and has ended."""
        cancelled, srun = self._cancelled.get(step.id), self._sruns.get(step.name)
        if cancelled is None:
            return False
        # Our own srun sees the end of its step also while slurmctld is away.
        return now >= cancelled.at + STALE_S or (srun is not None and srun.poll() is not None)

    def forget(self, listed: Collection[str], now: float) -> None:
        """Forget steps that have ended. `listed`: the ids in Slurm's list.

        After slurmctld was away it lists a step late.
        """
        self._cancelled = {
            id_: each
            for id_, each in self._cancelled.items()
            if id_ in listed or now < each.at + STALE_S
        }
        names = {each.name for each in self._cancelled.values()}
        self._sruns = {
            name: srun for name, srun in self._sruns.items() if srun.poll() is None or name in names
        }


ENDED_ALREADY = ("Invalid job id", "already completing or completed", "does not exist")
NO_TOPOLOGY = ("topology", "No switch", "not found")
STEP_S = 20.0  # for a step to be listed
GIVE_BACK_S = 30.0  # between two tries to take a host out of the allocation
LOOK_S = 0.1
NODE_SCRIPT = "slurm_node.sh"


class SlurmManager:
    """Lists, requests and ends the placements whose ids begin with `prefix`.

    `allocation`: id of the job whose hosts are used first; empty: there is none. `options`: of
    sbatch, for further jobs. `drain_s`: how long before the end of its time a job is signalled.
    Variables of the environment that change Slurm's answers are not passed on to its commands.
    """

    def __init__(
        self,
        folder: Path,
        prefix: str,
        allocation: str = "",
        options: SbatchOptions | None = None,
        drain_s: float = 60.0,
    ) -> None:
        self._folder = folder
        self._prefix = prefix
        self._allocation = allocation
        self._options = options or SbatchOptions()
        self._drain_s = drain_s
        self._alone = asyncio.Lock()
        self._switches: dict[str, str] = {}  # by host; they do not change while we run
        self._ends = StepEnds()
        self._avoided: dict[str, Sequence[str]] = {}  # hosts, by the name of the further job
        self._give_back_at = 0.0  # not before
        self._kept_against_will: list[str] = []  # hosts, which has been printed

    async def observe(self) -> Sequence[Placement]:
        await self._look_for_preemption()
        jobs, nodes = await self._jobs(), await self._nodes()
        now = time.monotonic()
        held = await self._allocated(jobs)
        listed = await self._listed_steps()
        running = [step for step in listed if not self._ends.has_ended(step, now)]
        await self._give_back(jobs, held, nodes, running)
        steps = []
        for step in self._own(listed):
            node = nodes.get(step.host)
            # A host that fails is taken out of the allocation, but its steps stay listed.
            up = step.host in held and (node is None or not node.gone)
            runs = up and step in running
            holding = Holding.RUNNING if runs else Holding.ENDED
            steps.append(_placement(step.name, step.id, holding, step.host, _notice(node)))
        self._ends.forget({step.handle for step in steps}, now)
        free = _list_free(held, nodes, steps)
        found = []
        for job in jobs:
            if not job.name.startswith(self._prefix):
                continue
            node = nodes.get(job.hosts)
            notice = _notice(node)
            if job.left_s is not None and job.holding is Holding.RUNNING and notice is None:
                if job.left_s <= 2 * self._drain_s:
                    notice = Notice(reason="its job's time is over soon", until=now + job.left_s)
            placement = _placement(job.name, job.id, job.holding, job.hosts, notice, job.why)
            better = [host for host in free if host not in self._avoided.get(job.name, ())]
            if job.holding is Holding.WAITING and not job.hosts and better:
                free.remove(better[0])
                why = f"{job.why}, while {better[0]} of job {self._allocation} is free"
                placement = dataclasses.replace(placement, why=why, stuck=True)
            found.append(placement)
        return [await self._labelled(placement) for placement in (*found, *steps)]

    async def request(self, order: PlacementOrder) -> None:
        async with self._alone:  # a request must be listed before more is decided
            found = await self.observe()
            if any(each.id == order.id for each in found):
                return
            host = await self._free_host(found, order.avoid)
            if host:
                await self._start_step(order, host)
            else:
                await self._submit(order)

    async def release(self, id_: PlacementId, handle: str) -> None:
        self._ends.record_cancel(handle, id_, time.monotonic())
        self._avoided.pop(id_, None)
        await self._ask("scancel", handle, allow=ENDED_ALREADY)

    async def close(self) -> None:
        pass

    # ------------------------------------------------------------ asking

    async def _jobs(self) -> list[SlurmJob]:
        """List this user's jobs, also jobs that have just ended."""
        text = await self._ask(
            *("squeue", "--me", "--noheader", "--all", "--states=all"), f"--format={JOBS}"
        )
        return read_jobs(text)

    async def _look_for_preemption(self) -> None:
        """Raise StoppedByOperator if the whole allocation is taken away soon."""
        if not self._allocation:
            return
        mine = f"--jobs={self._allocation}"
        text = await self._ask("squeue", "--noheader", mine, f"--Format={PREEMPTION}")
        if text.strip() not in NONE:
            raise StoppedByOperator(f"Slurm preempts job {self._allocation}")

    async def _nodes(self) -> dict[str, SlurmNode]:
        text = await self._ask("sinfo", "--noheader", "--all", "--Node", f"--format={NODES}")
        return {node.name: node for node in read_nodes(text)}

    async def _labelled(self, placement: Placement) -> Placement:
        """Add the switch of its host, if Slurm is configured with switches."""
        host = placement.host
        if placement.holding is not Holding.RUNNING or not host:
            return placement
        if host not in self._switches:
            text = await self._ask("scontrol", "show", "topology", host, allow=NO_TOPOLOGY)
            self._switches[host] = read_leaf_switch(text)
        switch = self._switches[host]
        return dataclasses.replace(placement, domains=(f"switch={switch}",) if switch else ())

    async def _listed_steps(self) -> list[SlurmStep]:
        """List all steps of the allocation, also steps that a user has started there."""
        if not self._allocation:
            return []
        text = await self._ask(
            *("squeue", "--me", "--noheader", "--all", "--steps"), f"--format={STEPS}"
        )
        steps = read_steps(text)
        return [step for step in steps if step.id.startswith(f"{self._allocation}.")]

    def _own(self, steps: Sequence[SlurmStep]) -> list[SlurmStep]:
        return [step for step in steps if step.name.startswith(self._prefix)]

    async def _give_back(
        self,
        jobs: Sequence[SlurmJob],
        held: Sequence[str],
        nodes: Mapping[str, SlurmNode],
        steps: Sequence[SlurmStep],
    ) -> None:
        """Take hosts out of the allocation that are to be left and have no step any more.

        Slurm does not call a host drained, nor reboot it, while a job holds it.
        """
        script_host = next((job.script_host for job in jobs if job.id == self._allocation), "")
        busy = {script_host, *(step.host for step in steps if not step.is_of_slurm)}
        left = [host for host in held if host in nodes and nodes[host].leaving and host not in busy]
        kept = ",".join(host for host in held if host not in left)
        # An allocation cannot become empty.
        if not left or not kept or not script_host or time.monotonic() < self._give_back_at:
            return
        self._give_back_at = time.monotonic() + GIVE_BACK_S
        try:
            change = (f"JobId={self._allocation}", f"NodeList={kept}")
            # scontrol leaves two scripts where it runs, for the environment of users' shells.
            with tempfile.TemporaryDirectory() as folder:
                await self._ask("scontrol", "update", *change, folder=folder)
        except Unreachable as error:  # a site may forbid it
            if self._kept_against_will != left:
                self._kept_against_will = left
                text = f"holdfast: {', '.join(left)} cannot be given back before the job's end"
                print_plain(f"{text} ({error})", file=sys.stderr, flush=True)

    async def _allocated(self, jobs: Sequence[SlurmJob]) -> list[str]:
        """Return the hosts that the allocation has now."""
        hosts = next((job.hosts for job in jobs if job.id == self._allocation), "")
        if not hosts:
            return []
        return (await self._ask("scontrol", "show", "hostnames", hosts)).split()

    async def _free_host(self, found: Sequence[Placement], avoid: Sequence[str]) -> str:
        """Return a host of the allocation that works and has no agent; empty if there is none."""
        if not self._allocation:
            return ""
        held = await self._allocated(await self._jobs())
        free = _list_free(held, await self._nodes(), found)
        return next((host for host in free if host not in avoid), "")

    # ------------------------------------------------------------ acting

    async def _start_step(self, order: PlacementOrder, host: str) -> None:
        """Start a step, and wait until it is listed. Refused if it ends at once."""
        command = [
            *("srun", f"--jobid={self._allocation}", f"--job-name={order.id}", "--overlap"),
            *("--nodes=1", "--ntasks=1", f"--nodelist={host}", "--mem=0", "--cpu-bind=none"),
            # Also in a job whose own environment is not exported (SLURM_EXPORT_ENV).
            "--export=ALL",
            *("--input=none", "--unbuffered", "bash", str(self._node_script()), *order.command),
        ]
        step = _start_apart(command, self._environment(order, keep=True))
        self._ends.record_start(order.id, step)
        deadline = time.monotonic() + STEP_S
        while not any(each.name == order.id for each in await self._listed_steps()):
            if step.poll() is not None:
                raise Refused(f"srun on {host} ended with status {step.returncode}")
            if time.monotonic() >= deadline:
                step.kill()
                raise Unreachable(f"srun on {host} did not start a step in {STEP_S:g} s")
            await asyncio.sleep(LOOK_S)

    async def _submit(self, order: PlacementOrder) -> None:
        self._avoided[order.id] = order.avoid
        await self._ask(
            *("sbatch", "--parsable", *self._options.of_further_job(order.avoid), "--export=ALL"),
            *(f"--job-name={order.id}", "--nodes=1", "--ntasks=1", "--exclusive", "--no-requeue"),
            f"--signal=B:TERM@{self._drain_s:.0f}",
            f"--output={escape_pattern(str(self._folder))}/logs/{order.id}.txt",
            *(str(self._node_script()), *order.command),
            environment=self._environment(order, keep=False),
        )

    def _environment(self, order: PlacementOrder, *, keep: bool) -> dict[str, str]:
        """Make the agent's environment; `keep` the variables of the allocation."""
        own = clean_environment(os.environ)
        own = {n: v for n, v in own.items() if keep or not n.startswith("SLURM_")}
        own |= {n: v for n, v in os.environ.items() if n == "SLURM_CONF"}
        return {
            **own,
            **order.environment,
            "HOLDFAST_PLACEMENT": order.id,
            "HOLDFAST_SLURM_JOB": self._allocation,
        }

    def _node_script(self) -> Path:
        (self._folder / "logs").mkdir(parents=True, exist_ok=True)
        path = self._folder / NODE_SCRIPT
        if not path.exists():
            temporary = path.with_suffix(f".{os.getpid()}")
            temporary.write_text(NODE)
            temporary.rename(path)
        return path

    async def _ask(
        self,
        *command: str,
        environment: Mapping[str, str] | None = None,
        allow: Sequence[str] = (),
        folder: str | None = None,
    ) -> str:
        """Run a command of Slurm in a folder, or in the present one.

        Unreachable: it failed with an error that is not in `allow`.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=folder,
                env=clean_environment(os.environ) if environment is None else environment,
            )
        except FileNotFoundError:
            raise Unreachable(f"there is no command {command[0]}: is Slurm installed?") from None
        try:
            out, err = await process.communicate()
        except asyncio.CancelledError:
            if process.returncode is None:
                process.kill()
            raise
        problem = err.decode(errors="replace").strip()
        if process.returncode and not any(each in problem for each in allow):
            told = read_problem(problem) or f"exit status {process.returncode}"
            raise Unreachable(f"{command[0]}: {told}")
        return out.decode(errors="replace")


def _start_apart(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process that outlives us: whatever replaces us finds its step in Slurm's list."""
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
    )


def _list_free(
    hosts: Sequence[str], nodes: Mapping[str, SlurmNode], found: Sequence[Placement]
) -> list[str]:
    """List which of these hosts work, are not to be left, and have no agent."""
    taken = {placement.host for placement in found if placement.holding is not Holding.ENDED}
    usable = {name for name, node in nodes.items() if node.up and not node.leaving}
    return [host for host in hosts if host in usable and host not in taken]


def _notice(node: SlurmNode | None) -> Notice | None:
    return Notice(reason=node.leaving) if node is not None and node.leaving else None


def _placement(
    name: str, handle: str, holding: Holding, host: str, notice: Notice | None, why: str = ""
) -> Placement:
    id_ = PlacementId(name)
    return Placement(id=id_, handle=handle, holding=holding, host=host, notice=notice, why=why)


def open_manager(plan: FleetPlan, spec: JobSpec) -> SlurmManager:
    """Open the manager of the job in whose allocation we run."""
    options = plan.settings.get("options", "")
    return SlurmManager(
        Path(plan.run_dir),
        job_prefix(spec.job),
        os.environ.get("SLURM_JOB_ID", ""),
        read_options(options.split("\n") if options else ()),
        plan.drain_s,
    )


SCRIPT = "slurm_job.sh"
ABANDON_S = 60.0  # only a requeue brings a coordinator back after so long, and that ends all nodes


def main(argv: list[str]) -> int:
    """Submit a job, and return at once. Exit status 0: Slurm has taken it in."""
    parser = launch_parser(
        "slurm",
        "Submit a training script to Slurm: one job with --nodes nodes, which starts a coordinator "
        "and one agent on each node, replaces nodes that are lost, leaves nodes that are drained, "
        "and grows by further jobs. The run directory must be on a file system that all nodes "
        "share. Workers' output goes to files in it.",
        {
            "--host": "the name of the node where the coordinator runs",
            "--abandon-s": f"{ABANDON_S:g}",
        },
    )
    group = parser.add_argument_group("Slurm")
    group.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="an option of sbatch for the job and its further jobs; may be repeated: "
        "--sbatch=--partition=gpu --sbatch=--time=12:00:00",
    )
    group.add_argument(
        "--write-script",
        action="store_true",
        help="write the batch script and say where it is, instead of submitting it",
    )
    options = parser.parse_args(argv)
    prefer(options, "nodes.abandon_s", ABANDON_S)
    found = read_options(options.sbatch, options.drain_s)
    settings = {"options": "\n".join(options.sbatch), "listen": options.host}
    run_dir = make_run_dir(options, "slurm", settings)
    if found.time_s is not None and not run_dir.spec().checkpoints.store:
        print_line(
            "without --store nothing is kept when the job's time is over: a job that "
            "takes longer than --sbatch=--time does not end its training"
        )
    write_script(run_dir, options.nodes, options.port)
    if options.write_script:
        print_line(f"submit it with: sbatch {run_dir.path / SCRIPT}")
        return 0
    return submit(run_dir)


def go_on(run_dir: RunDir, host: str, port: int) -> int:
    """Submit a job again, unchanged."""
    return submit(run_dir)


def write_script(run_dir: RunDir, nodes: int, port: int) -> None:
    plan, spec = read_plan(run_dir), run_dir.spec()
    host, given, least = plan.settings["listen"], plan.settings["options"], spec.nodes.min
    listen = (*(("--host", host) if host else ()), "--port", str(port))
    text = job_script(
        name=job_prefix(spec.job).rstrip("-"),
        prefix=job_prefix(spec.job),
        # A job that may begin with fewer nodes also begins again with fewer.
        nodes=f"{least}-{nodes}" if least < nodes else str(nodes),
        command=(sys.executable, "-m", "holdfast.engine.fleet.cluster_job", plan.run_dir, *listen),
        output=f"{escape_pattern(plan.run_dir)}/slurm-%j.txt",
        signal_s=plan.drain_s,
        options=read_options(given.split("\n") if given else ()).of_job(),
        has_store=bool(spec.checkpoints.store),
    )
    (run_dir.path / SCRIPT).write_text(text)


def submit(run_dir: RunDir) -> int:
    """Hand the script to sbatch. UserError with sbatch's words if it refuses."""
    try:
        found = subprocess.run(
            ["sbatch", "--parsable", str(run_dir.path / SCRIPT)],
            env=clean_environment(os.environ),
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        raise UserError(
            "there is no command sbatch here: use a machine that submits jobs"
        ) from None
    if found.returncode:
        raise UserError(f"sbatch refuses the job: {read_problem(found.stderr)}")
    print_line(f"submitted as Slurm job {found.stdout.strip()}")
    return 0
