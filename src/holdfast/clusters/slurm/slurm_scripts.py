"""Writes the scripts that Slurm runs: one for the job, and one for each of its nodes. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from holdfast.engine.fleet.fleet_plan import STILL_RUNNING

# Variables by which a user changes what Slurm's commands print or do.
PLAIN = """\
unset "${!SQUEUE_@}" "${!SCANCEL_@}" "${!SCONTROL_@}" SLURM_TIME_FORMAT SLURM_CLUSTERS
"""

# The job's own allocation: when the coordinator's time is nearly over, the job is stopped, and
# requeued to go on from its newest checkpoint. A job that is cancelled meanwhile is not. Whatever
# its end, its further jobs are cancelled, unless they belong to an earlier job that still runs.
# A job that Slurm preempts ends after a last checkpoint, and is requeued as Slurm would have done.
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
    nodes: int,
    command: Sequence[str],
    output: str,
    signal_s: float,
    options: Sequence[str] = (),
    has_store: bool = True,
) -> str:
    """Write the batch script of a whole job; `options` are sbatch's, from the user.

    `prefix` begins the names of its further jobs. `signal_s`: how long before the end of its time
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
