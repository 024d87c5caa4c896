"""Reads the output of Slurm's commands, in the formats that are set here. Pure.

Fields are separated by `|`; a field that may hold any character comes last.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.clusters.slurm.slurm_batch import read_time
from holdfast.engine.core.errors import Damaged
from holdfast.engine.core.fleet.placements import Holding

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
