"""Makes the options, the environment and the scripts for Slurm, and reads its output. Pure.

A user's options of sbatch are checked: an option that would replace one of ours is refused. Hosts
to exclude are joined with the hosts that a request avoids. Variables of the environment that change
the output of Slurm's commands are left out. One script runs the job, and one each of its nodes.
The output is in formats that are set here: fields are separated by `|`; a field that may hold any
character comes last.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.engine.core.errors import Damaged, UserError
from holdfast.engine.core.fleet.placements import Holding
from holdfast.engine.fleet.cluster_manager import STILL_RUNNING

OPTION_MAX = 4096  # characters
# Options of one letter, whose value may follow at once: -pgpu.
SHORT = {
    "-J": "--job-name",
    "-N": "--nodes",
    "-n": "--ntasks",
    "-a": "--array",
    "-w": "--nodelist",
    "-F": "--nodefile",
    "-x": "--exclude",
    "-o": "--output",
    "-i": "--input",
    "-t": "--time",
    "-W": "--wait",
    "-M": "--clusters",
    "-V": "--version",
    "-h": "--help",
    "-s": "--oversubscribe",
    "-H": "--hold",
    "-b": "--begin",
    "-d": "--dependency",
}
REFUSED = {
    "--job-name": "Holdfast finds its jobs by their names",
    "--nodes": "use --nodes of this command",
    "--ntasks": "a node runs one agent, which starts --nproc workers",
    "--ntasks-per-node": "a node runs one agent, which starts --nproc workers",
    "--array": "each task would need a run directory of its own: launch as many jobs",
    "--nodelist": "a node that is lost could not be replaced: use --sbatch=--reservation, "
    "--sbatch=--constraint or --sbatch=--exclude",
    "--nodefile": "a node that is lost could not be replaced: use --sbatch=--reservation, "
    "--sbatch=--constraint or --sbatch=--exclude",
    "--output": "the job's output is slurm-JOB.txt in the run directory",
    "--input": "the job's script reads nothing",
    "--signal": "use --drain-s of this command",
    "--oversubscribe": "Holdfast's nodes are its own",
    "--wait": "this command returns at once: use `holdfast status`",
    "--wrap": "Holdfast writes the script",
    "--clusters": "submit the job from a machine of that cluster",
    "--test-only": "use --write-script, and sbatch --test-only with the script",
    "--version": "it is no option of a job",
    "--help": "it is no option of a job",
    "--usage": "it is no option of a job",
}
# Options for the time at which the job begins. Its further jobs begin while it runs, and do not
# take them.
BEGINNINGS = ("--hold", "--begin", "--dependency")
# Variables for sbatch that a user may set. All other ones replace options of the script.
KEPT = re.compile(
    "SBATCH_(ACCOUNT|PARTITION|QOS|RESERVATION|CONSTRAINT|TIMELIMIT|GRES|GPUS.*|MEM_PER_.*|WCKEY)"
)
LEFT_OUT = re.compile(
    "(SBATCH|SQUEUE|SINFO|SALLOC|SRUN|SCANCEL|SCONTROL|SACCT)_.*"
    "|SLURM_(TIME_FORMAT|EXPORT_ENV|CLUSTERS|BITSTR_LEN|DEBUG_FLAGS|JSON|YAML|EXCLUSIVE|WAIT.*)"
)
TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class SbatchOptions:
    """Keeps the options of sbatch that a user has given. `exclude`: hosts, as Slurm writes them."""

    options: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    #: The most seconds that the job may take. None: Slurm's own limit.
    time_s: float | None = None

    def of_job(self) -> list[str]:
        """Return the options of the job itself."""
        return [*self.options, *_exclude(self.exclude)]

    def of_further_job(self, avoided: Sequence[str]) -> list[str]:
        """Return the options of a further job, which must not run on these hosts either."""
        kept = [each for each in self.options if _split(each)[0] not in BEGINNINGS]
        return [*kept, *_exclude([*self.exclude, *avoided])]


def read_options(given: Sequence[str], drain_s: float = 0.0) -> SbatchOptions:
    """Read options of sbatch. UserError for other texts, and for options that replace ours.

    `drain_s`: how long before the end of its time Slurm signals the job.
    """
    options: list[str] = []
    exclude: list[str] = []
    time_s: float | None = None
    for each in given:
        name, value = _split(each)
        if name in REFUSED:
            raise UserError(f"--sbatch={each} cannot be used: {REFUSED[name]}")
        if name == "--exclude":
            exclude.append(value)
            continue
        if name == "--time":
            time_s = read_time(value)
            if time_s is not None and time_s <= 2 * drain_s:
                raise UserError(
                    f"--sbatch={each} leaves no time to train: Slurm speaks of the end "
                    f"{drain_s:g} s before it (--drain-s), so allow more than {2 * drain_s:g} s"
                )
        options.append(each)
    return SbatchOptions(options=tuple(options), exclude=tuple(exclude), time_s=time_s)


def _exclude(hosts: Sequence[str]) -> list[str]:
    return [f"--exclude={','.join(hosts)}"] if hosts else []


def _split(option: str) -> tuple[str, str]:
    """Return an option's long name and its value."""
    if len(option) > OPTION_MAX:
        raise UserError(f"--sbatch={option[:40]}... is too long: {OPTION_MAX} characters at most")
    if not option.startswith("-") or any(char in option for char in '\n"'):
        raise UserError(f"--sbatch {option!r} is no option: write --sbatch=--partition=gpu")
    if option.startswith("--"):
        name, _, value = option.partition("=")
        if not value and " " in name:
            raise UserError(f"--sbatch={option} has a blank: write --sbatch={name.split()[0]}=...")
        return name, value
    return SHORT.get(option[:2], option[:2]), option[2:].lstrip("= ")


def read_time(text: str) -> float | None:
    """Return the seconds of a time limit as sbatch takes it; None: it is none, or no limit.

    Minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes or
    days-hours:minutes:seconds (sbatch(1)).
    """
    found = TIME.fullmatch(text)
    if found is None:
        return None
    days, *parts = (int(each) if each is not None else None for each in found.groups())
    first, second, third = parts
    units = (3600, 60, 1) if days is not None or third is not None else (60, 1, 0)
    amounts = zip(units, (first, second, third), strict=True)
    return float(86400 * (days or 0) + sum(unit * (each or 0) for unit, each in amounts))


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which Slurm's commands answer and act as Holdfast asks."""
    return {
        name: value
        for name, value in environment.items()
        if KEPT.fullmatch(name) or not LEFT_OUT.fullmatch(name)
    }


# Variables by which a user changes what Slurm's commands print or do.
PLAIN = """\
unset "${!SQUEUE_@}" "${!SCANCEL_@}" "${!SCONTROL_@}" SLURM_TIME_FORMAT SLURM_CLUSTERS
"""

# The job's own allocation: when the coordinator's time is nearly over, the job is stopped, and
# requeued to continue from its newest checkpoint, unless it has been cancelled. Whatever its end,
# its further jobs are cancelled, unless they belong to an earlier job that still runs. A job that
# Slurm preempts ends after a last checkpoint, and is requeued as Slurm would have done.
JOB = """\
#!/bin/bash
{directives}
again=no
trap 'again=yes; {near}; kill -TERM $!' USR1
trap 'again=no; kill -TERM $!' TERM INT
{command} &
while true; do
  wait $!
  kill -0 $! 2>/dev/null || break
done
wait $!  # once more: a signal may have ended the last one, and the status been its number
code=$?
{plain}
[ "$code" = {running} ] && exit "$code"
squeue --me --noheader --format='%i %j' |
  while read -r id name; do case "$name" in {prefix}*) scancel "$id" ;; esac; done
runs=$(squeue --noheader --jobs="$SLURM_JOB_ID" --states=R --format=%i)
case "$(squeue --noheader --jobs="$SLURM_JOB_ID" --Format=preempttime)" in
  [0-9]*) [ "$code" != 0 ] && [ -n "$runs" ] && scontrol requeue "$SLURM_JOB_ID" ;;
  *) [ "$again $code" = "yes 130" ] && [ -n "$runs" ] && {requeue} ;;
esac
exit "$code"
"""
NEAR = 'echo "holdfast: the time limit of Slurm job $SLURM_JOB_ID is near, so the job is stopped"'
REQUEUE = 'scontrol requeue "$SLURM_JOB_ID"'
NO_STORE = (
    'echo "holdfast: it is not begun again: without --store there is no checkpoint to go on from"'
)

# A node: its agent, and a process that looks after the job. With --no-kill, Slurm lets a job that
# loses the host of its script hold the other hosts for ever; a node that finds it so requeues it.
# A further job ends while the job waits to begin again: it may hold a host that the job needs.
NODE = """\
#!/bin/bash
look() {
  {plain}
  found=$(squeue --noheader --jobs="$HOLDFAST_SLURM_JOB" --format='%t %B %N' 2>&1)
  case "$? $found" in
    "0 " | "0 PD "* | *"Invalid job id"*) kill -TERM $$ ;;
    "0 R "*)
      read -r state host hosts <<<"$found"
      scontrol show hostnames "$hosts" | grep -qxF "$host" ||
        scontrol requeue "$HOLDFAST_SLURM_JOB" ;;
  esac
}
if [ -n "$HOLDFAST_SLURM_JOB" ]; then
  (while sleep "${HOLDFAST_SLURM_LOOK_S:-30}" && kill -0 $$; do look; done) >/dev/null 2>&1 &
fi
exec "$@"
""".replace("{plain}", PLAIN.strip())


def job_script(
    *,
    name: str,
    prefix: str,
    nodes: str,
    command: Sequence[str],
    output: str,
    signal_s: float,
    options: Sequence[str] = (),
    has_store: bool = True,
) -> str:
    """Write the batch script of a whole job; `options` are sbatch's, from the user.

    `nodes`: their number, or the least and the largest, as in 2-4. `prefix` begins the names of its
    further jobs. `signal_s`: how long before the end of its time
    it is signalled. `has_store`: its checkpoints outlive its nodes.
    """
    directives = [
        *(f"--job-name={name}", f"--nodes={nodes}", "--ntasks-per-node=1", "--exclusive"),
        *("--no-kill", "--requeue", "--open-mode=append", f"--output={output}"),
        *(f"--signal=B:USR1@{signal_s:.0f}", *options),
    ]
    return JOB.format(
        directives="\n".join(f"#SBATCH {_directive(each)}" for each in directives),
        command=shlex.join(command),
        prefix=shlex.quote(prefix),
        plain=PLAIN,
        near=NEAR,
        running=STILL_RUNNING,
        requeue=REQUEUE if has_store else NO_STORE,
    )


def escape_pattern(path: str) -> str:
    """Return a path as sbatch takes the name of an output file, in which % stands for fields."""
    return path.replace("%", "%%")


def _directive(option: str) -> str:
    """Quote an option for a line of #SBATCH, which knows double quotes."""
    return f'"{option}"' if any(char.isspace() for char in option) else option


# For squeue: id, state, host of the script, hosts, time that is left, reason, name.
JOBS = "%i|%t|%B|%N|%L|%r|%j"
STEPS = "%i|%N|%j"  # for squeue --steps
PREEMPTION = "preempttime"  # for squeue --Format: when Slurm asked it to make room for another job
NODES = "%N|%T|%E"  # for sinfo --Node: name, state, reason

WAITING = ("PD", "CF", "RQ", "RF", "RH", "RD", "RS", "SE", "SO")
RUNNING = ("R", "S", "ST", "SI", "RV")
FLAGS = "*~#!%$@^-+"  # characters that may follow a node's state
LEAVING = ("draining", "drained", "drng", "drain", "maint", "perfctrs", "reboot")
GONE = ("down", "fail", "failing", "powered_down", "future", "error")
# slurmctld has begun again, and the node has not reported yet.
UNKNOWN = "unknown"
NONE = ("", "n/a", "N/A", "(null)", "NONE", "None", "Unknown")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """Describes a job. `why`: Slurm's reason for letting it wait."""

    id: str
    name: str
    holding: Holding
    script_host: str = ""
    #: As Slurm abbreviates them.
    hosts: str = ""
    #: The seconds until its time limit. None: it has no limit.
    left_s: float | None = None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmStep:
    id: str
    name: str
    host: str

    @property
    def is_of_slurm(self) -> bool:
        """Return whether Slurm itself has made it, on every host of the job."""
        return self.id.endswith(".extern")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmNode:
    """Describes a host. `leaving`: why it should be left, if it should."""

    name: str
    #: What ran there has ended.
    gone: bool = False
    #: It can start things.
    up: bool = True
    leaving: str = ""


def read_jobs(text: str) -> list[SlurmJob]:
    """Read the output of squeue in the format JOBS. Damaged."""
    return [_job(*fields) for fields in _rows(text, 7)]


def _job(
    id_: str, state: str, script_host: str, hosts: str, left: str, why: str, name: str
) -> SlurmJob:
    # A job that completes starts no further process.
    holding = Holding.ENDED
    if state in RUNNING:
        holding = Holding.RUNNING
    elif state in WAITING:
        holding = Holding.WAITING
    return SlurmJob(
        id=id_,
        name=name,
        holding=holding,
        script_host="" if script_host in NONE else script_host,
        hosts="" if hosts in NONE else hosts,
        left_s=_time_left(left),
        why="" if why in NONE else why,
    )


def read_steps(text: str) -> list[SlurmStep]:
    """Read the output of squeue --steps in the format STEPS. Damaged."""
    return [SlurmStep(id=i, name=name, host=host) for i, host, name in _rows(text, 3)]


def read_nodes(text: str) -> list[SlurmNode]:
    """Read the output of sinfo --Node in the format NODES; a host may be in several partitions."""
    found = {name: _node(name, state, why) for name, state, why in _rows(text, 3)}
    return list(found.values())


def _node(name: str, state: str, reason: str) -> SlurmNode:
    word, marks = state.rstrip(FLAGS).lower(), state[len(state.rstrip(FLAGS)) :]
    leaving = word in LEAVING or "@" in marks  # @: it is to be rebooted
    why = reason if reason not in ("none", *NONE) else f"Slurm calls it {state}"
    gone = word in GONE
    up = not gone and word != UNKNOWN
    return SlurmNode(name=name, gone=gone, up=up, leaving=why if leaving else "")


def read_leaf_switch(text: str) -> str:
    """Read the switch of a host from `scontrol show topology HOST`; empty: it names none."""
    for line in text.splitlines():
        words = dict(word.partition("=")[::2] for word in line.split())
        if words.get("Level") == "0" and "SwitchName" in words:
            return words["SwitchName"]
    return ""


def read_problem(text: str) -> str:
    """Return the first complaint of a command of Slurm, without the advice before it."""
    lines = [line.partition(": error: ")[2] or line for line in text.strip().splitlines()]
    told = [line.strip() for line in lines if "--num-threads" not in line]
    problem = told[0] if told else ""
    return f"{problem}; is munged running on this host?" if "unge" in problem else problem


def _rows(text: str, fields: int) -> list[list[str]]:
    rows = [line.split("|", fields - 1) for line in text.splitlines() if line.strip()]
    for row in rows:
        if len(row) != fields:
            raise Damaged(f"Slurm's answer cannot be read: {'|'.join(row)[:200]!r}")
    return [[each.strip() for each in row] for row in rows]


def _time_left(text: str) -> float | None:
    """Read the time until a limit; after the limit it is negative or called INVALID."""
    if text in ("UNLIMITED", "NOT_SET", *NONE):
        return None
    if text == "INVALID" or text.startswith("-"):
        return 0.0
    left_s = read_time(text)
    if left_s is None:
        raise Damaged(f"Slurm's answer cannot be read: {text[:40]!r} is no time")
    return left_s
