"""Writes the scripts that Slurm runs: one for the job, and one for each of its nodes. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

# The job's own allocation: when the coordinator's time is nearly over, the job is stopped, and
# requeued to go on from its newest checkpoint. Whatever its end, its further jobs are cancelled.
JOB = """\
#!/bin/bash
{directives}
again=no
trap 'again=yes; kill -TERM $!' USR1
trap 'kill -TERM $!' TERM INT
{command} &
while true; do
  wait $!
  kill -0 $! 2>/dev/null || break
done
wait $!  # once more: a signal may have ended the last one, and the status been its number
code=$?
squeue --me --noheader --format='%i %j' |
  while read -r id name; do case "$name" in {prefix}*) scancel "$id" ;; esac; done
if [ "$again" = yes ] && [ "$code" = 130 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""

# A node: its agent, and a process that looks after the job. With --no-kill, Slurm lets a job that
# loses the host of its script hold the other hosts for ever; a node that finds it so requeues it.
NODE = """\
#!/bin/bash
look() {
  found=$(squeue --noheader --jobs="$HOLDFAST_SLURM_JOB" --format='%t %B %N' 2>&1)
  case "$? $found" in
    "0 " | *"Invalid job id"*) kill -TERM $$ ;;
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
"""


def job_script(
    *,
    name: str,
    prefix: str,
    nodes: int,
    command: Sequence[str],
    output: str,
    signal_s: float,
    options: Sequence[str] = (),
) -> str:
    """Write the batch script of a whole job; `options` are sbatch's, from the user.

    `prefix` begins the names of its further jobs. `signal_s`: how long before the end of its time
    it is told.
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
    )


def _directive(option: str) -> str:
    """Quote an option for a line of #SBATCH, which knows double quotes."""
    return f'"{option}"' if any(char.isspace() for char in option) else option
