"""Runs a real Slurm on this machine: munged, slurmctld and several slurmd, each a host of its own.

It is for tests of jobs under Slurm, and a harness for the contract of adapters. Its servers have
little patience: tests need not wait for minutes until a host counts as down, or a requeued job may
start (cred_expire).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from holdfast.clusters.slurm.slurm_manager import SlurmManager
from holdfast.engine.core.fleet.placements import PlacementId
from holdfast.lab.contracts.cluster_contract import PREFIX

PACKAGES = {
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
}
PATH = "/usr/sbin:/sbin:/usr/bin:/bin"
WAIT_S = 30.0
REBOOT_S = 90.0
DAEMON_OF = "HOLDFAST_SLURM_DAEMON_OF"  # set in the environment of a host's daemons
CLIENTS = ("srun", "sbatch", "slurmstepd", "slurmd", "slurmctld")
CONFIGURATION = """\
ClusterName=holdfast
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/{track}
TaskPlugin=task/{task}
MpiDefault=none
MailProg=/bin/true
SelectType=select/{select}
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
SlurmctldTimeout=5
SlurmdTimeout=6
KillWait=5
UnkillableStepTimeout=20
MinJobAge=30
MessageTimeout=5
ReturnToService=2
TopologyPlugin=topology/tree
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
RebootProgram={folder}/reboot.sh
"""
# Asks the harness, since a host is some processes of this machine.
REBOOT = f"""\
#!/bin/sh
touch "{{folder}}/reboot-${DAEMON_OF}"
"""
# Control groups hold each step to its memory. The lab's slurmds are of one machine, and share them.
CGROUPS = """\
CgroupAutomount=no
ConstrainRAMSpace=yes
ConstrainSwapSpace=yes
AllowedSwapSpace=0
"""
CONTROLLERS = Path("/sys/fs/cgroup")
# Jobs of the partition "low" make room for those of "main", after some time.
GRACE_S = 20
PARTITIONS = f"""\
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=low Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 GraceTime={GRACE_S}
"""


def topology(hosts: Sequence[str]) -> str:
    """Connect each pair of hosts to a switch, and the switches to another one."""
    pairs = [",".join(hosts[first : first + 2]) for first in range(0, len(hosts), 2)]
    leaves = "".join(f"SwitchName=leaf{i} Nodes={each}\n" for i, each in enumerate(pairs))
    return f"{leaves}SwitchName=root Switches=leaf[0-{len(pairs) - 1}]\n"


class SlurmCluster:
    """Starts a cluster of `hosts` hosts for the length of a with statement.

    The environment variable SLURM_CONF names it in that time. `allocation`: the id of a job whose
    hosts the adapters made by `manager` use first. `memory_mb`: of each host; control groups hold
    steps to what their jobs ask for. `more`: further lines of the configuration.
    """

    def __init__(
        self, folder: Path, hosts: int = 6, memory_mb: int = 0, more: Sequence[str] = ()
    ) -> None:
        self.folder = folder
        self._more = more
        self._memory_mb = memory_mb
        self.hosts: Sequence[str] = tuple(f"node{number}" for number in range(hosts))
        self.domains = {h: (f"switch=leaf{i // 2}",) for i, h in enumerate(self.hosts)}
        self.allocation = ""
        self._servers: dict[str, subprocess.Popen[bytes]] = {}
        self._before: str | None = None

    @staticmethod
    def missing() -> str:
        """Return the missing programs and the package of each; empty if nothing is missing."""
        for command, package in PACKAGES.items():
            if shutil.which(command, path=PATH) is None:
                return f"there is no {command} here (package {package})"
        return "" if os.geteuid() == 0 else "Slurm's daemons are run as root"

    def __enter__(self) -> SlurmCluster:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        ports = free_ports(len(self.hosts) + 1)
        confined = self._memory_mb > 0
        text = CONFIGURATION.format(
            host=socket.gethostname(),
            port=ports[0],
            user="root",
            folder=self.folder,
            track="cgroup" if confined else "linuxproc",
            task="cgroup" if confined else "none",
            select="cons_tres\nSelectTypeParameters=CR_CPU_Memory" if confined else "linear",
        )
        if confined:
            (self.folder / "cgroup.conf").write_text(CGROUPS)
        for host, port in zip(self.hosts, ports[1:], strict=True):
            text += (
                f"NodeName={host} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 "
                f"Port={port} CPUs=1 RealMemory={self._memory_mb or 100}\n"
            )
        text += "".join(f"{line}\n" for line in self._more) + PARTITIONS
        (self.folder / "slurm.conf").write_text(text)
        reboot = self.folder / "reboot.sh"
        reboot.write_text(REBOOT.format(folder=self.folder))
        reboot.chmod(0o755)
        (self.folder / "topology.conf").write_text(topology(self.hosts))
        self._before = os.environ.get("SLURM_CONF")
        os.environ["SLURM_CONF"] = str(self.folder / "slurm.conf")
        try:
            self._start_all()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            self.slurm("scancel", "--me")
        for server in self._servers.values():
            server.kill()
            server.wait()
        for pid in our_processes(f"SLURM_CONF={self.folder}/slurm.conf"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for host in self.hosts:
            remove_groups(host)
        os.environ.pop("SLURM_CONF", None)
        if self._before is not None:
            os.environ["SLURM_CONF"] = self._before

    def _start_all(self) -> None:
        f = self.folder
        self._start(
            *("munged", "munged", "--foreground", "--force", f"--key-file={f}/munge.key"),
            *(f"--socket={f}/munge.sock", f"--pid-file={f}/munged.pid"),
            *(f"--log-file={f}/munged.log", f"--seed-file={f}/munged.seed"),
        )
        self._until((f / "munge.sock").exists, "munged listens")
        self._start("slurmctld", "slurmctld", "-D", "-i")
        self._until(lambda: "UP" in self.slurm("scontrol", "ping"), "slurmctld answers")
        for host in self.hosts:
            self._start(host, "slurmd", "-D", "-N", host)
        self._until(lambda: self.states() == ["idle"] * len(self.hosts), "all hosts are idle")

    def _start(self, name: str, *command: str) -> None:
        with open(self.folder / f"{name}.out", "ab") as output:
            self._servers[name] = subprocess.Popen(
                command,
                executable=shutil.which(command[0], path=PATH),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, DAEMON_OF: name},
            )

    def _until(self, ready: object, what: str, within_s: float = WAIT_S) -> None:
        assert callable(ready)
        deadline = time.monotonic() + within_s
        while not ready():
            logs = sorted(self.folder.glob("*.out"))
            tails = "\n".join(f"{p.name}: {p.read_text()[-300:]}" for p in logs)
            assert time.monotonic() < deadline, f"not in {within_s:g} s: {what}\n{tails}"
            time.sleep(0.05)

    def slurm(self, *command: str) -> str:
        """Run one of Slurm's commands and return its output; the command may fail."""
        found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S)
        return found.stdout.strip()

    def states(self) -> list[str]:
        """Return the state of each host, in order."""
        where = "--partition=main"
        return self.slurm("sinfo", "--noheader", "--Node", where, "--format=%T").split()

    def allocate(self, hosts: int) -> str:
        """Hold `hosts` hosts as an allocation, from which placements are served first."""
        subprocess.run(
            ["salloc", f"--nodes={hosts}", "--exclusive", "--no-kill", "--no-shell"],
            capture_output=True,
            check=True,
            timeout=WAIT_S,
        )
        jobs = self.slurm("squeue", "--me", "--noheader", "--format=%i").split()
        self.allocation = max(jobs, key=int)
        return self.allocation

    # ------------------------------------------------------------ harness

    def manager(self, job: str = PREFIX) -> SlurmManager:
        allocation = self.allocation if job in {PREFIX, "hf-"} else ""
        return SlurmManager(self.folder / "placements", job, allocation)

    def kill(self, host: str) -> None:
        """Kill all of a host, its daemons first, since they could report the end of the rest."""
        for pid in [
            *(self._servers[host].pid, *our_processes(f"{DAEMON_OF}={host}")),
            *our_processes(f"SLURMD_NODENAME={host}"),
        ]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._servers[host].wait()

    def drain(self, host: str, reason: str) -> None:
        self.slurm("scontrol", "update", f"nodename={host}", "state=drain", f"reason={reason}")

    def bring_back(self, host: str) -> None:
        """Have a host that was killed or drained take part again."""
        if self._servers[host].poll() is None:
            self.slurm("scontrol", "update", f"nodename={host}", "state=resume")
        else:
            self._start(host, "slurmd", "-D", "-N", host)

    def resume_blamed(self) -> None:
        """Resume the hosts that Slurm has drained for steps whose end it has missed.

        It misses ends while slurmctld is away. An operator finds no fault in these hosts.
        """
        for line in self.slurm("sinfo", "--noheader", "--Node", "--format=%N %E").splitlines():
            host, _, reason = line.partition(" ")
            if reason.strip() == "Kill task failed":
                self.slurm("scontrol", "update", f"nodename={host}", "state=resume")

    def reboot(self, host: str) -> None:
        """Reboot a host by Slurm, as soon as nothing runs there, and wait for that."""
        asked = self.folder / f"reboot-{host}"
        self.slurm("scontrol", "reboot", "ASAP", "nextstate=resume", "reason=a new kernel", host)
        self._until(asked.exists, f"{host} is rebooted", REBOOT_S)
        self.kill(host)
        asked.unlink()
        # -b: Slurm compares when the host was booted.
        self._start(host, "slurmd", "-D", "-b", "-N", host)

    def away(self, away: bool) -> None:
        if away:
            self._servers["slurmctld"].terminate()  # SIGKILL would make it forget the last seconds
            self._servers["slurmctld"].wait()
        else:
            self._start("slurmctld", "slurmctld", "-D")
            self._until(lambda: "UP" in self.slurm("scontrol", "ping"), "slurmctld answers")

    def processes(self, id_: PlacementId) -> list[int]:
        found = our_processes(f"HOLDFAST_PLACEMENT={id_}")
        return [pid for pid in found if command_of(pid) not in CLIENTS]


def remove_groups(host: str) -> None:
    """Remove the empty control groups of a host's slurmd."""
    for controller in CONTROLLERS.glob("*"):
        below = sorted(controller.glob(f"slurm_{host}/**/"), reverse=True)
        for folder in below:
            with contextlib.suppress(OSError):
                folder.rmdir()


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        return [int(each.getsockname()[1]) for each in sockets]


def our_processes(variable: str) -> list[int]:
    """Find the other processes that have NAME=VALUE in their environment."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if variable.encode() in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                found.append(int(name))
    return [pid for pid in found if pid != os.getpid()]


def command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""
