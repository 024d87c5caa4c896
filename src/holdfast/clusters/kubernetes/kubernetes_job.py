"""Runs a job's coordinator and controller in a pod, wherever Kubernetes starts it.

    python -m holdfast.clusters.kubernetes.kubernetes_job RUN_DIR

The job, its plan and its secret come from the environment; RUN_DIR is on a volume that outlives
the pod. Its address stays the same, so agents find the next pod, and the job continues. So SIGTERM,
with which Kubernetes ends pods, ends only this pod; SIGINT stops the job, as Ctrl-C does.

A pod of another Job than the last one resumes the job: the pods of the earlier Job go with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from holdfast.clusters.kubernetes.kubernetes_manifests import (
    ADDRESS_VARIABLE,
    JOB_VARIABLE,
    PLAN_VARIABLE,
    POD_VARIABLE,
    TRACKING,
    UID_VARIABLE,
    UNCOUNTED,
    instance_of,
)
from holdfast.engine.core.errors import Damaged, HoldfastError, UserError, first_line
from holdfast.engine.fleet.cluster_job import coordinate, release_all
from holdfast.engine.fleet.cluster_manager import FleetPlan, job_prefix
from holdfast.engine.fleet.fleet_process import manager_of
from holdfast.engine.host.lifetime import die_with_parent
from holdfast.engine.net.secret import load_secret, write_run_dir
from holdfast.engine.net.standard_streams import print_line
from holdfast.engine.net.tcp import listen
from holdfast.engine.runtime.contact import parse_address
from holdfast.engine.runtime.leadership.journal import FileJournal
from holdfast.engine.runtime.rundir import RunDir, write_json
from holdfast.engine.state.store.regular_files import DOCUMENT_BYTES_MAX, read_regular
from holdfast.engine.wire.job_document import decode_job

CRASHED = 3  # worth another pod
ENDED = 128 + signal.SIGTERM
INSIDE = "--inside"
UID_FILE = "kubernetes.json"
LOOK_S = 1.0


def main(argv: list[str]) -> int:
    if argv[1:] != [INSIDE]:
        return keep(
            [sys.executable, "-m", "holdfast.clusters.kubernetes.kubernetes_job", argv[0], INSIDE]
        )
    die_with_parent(os.getppid())
    try:
        return run(RunDir(Path(argv[0])))
    except UserError as error:
        print_line(error)
        return 2
    except (HoldfastError, asyncio.TimeoutError) as error:
        problem = str(error) or "the pods of the job's earlier nodes do not end"
        print_line(problem)
        return CRASHED


def keep(command: list[str]) -> int:
    """Run the job in a process of its own, which SIGTERM kills without a word to the job."""
    popen = subprocess.Popen(command)

    def end(number: int, frame: object) -> None:
        popen.kill()
        os._exit(ENDED)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, lambda number, frame: popen.terminate())
    return popen.wait()


def run(run_dir: RunDir) -> int:
    """Begin the job, or continue it where another pod left it. Returns the exit status."""
    if importlib.util.find_spec("lightkube") is None:
        raise UserError("this image lacks a package: build it with holdfast[kubernetes]")
    uid = os.environ.get(UID_VARIABLE, "")
    plan = prepare(run_dir)
    known, outcome = read_uid(run_dir), run_dir.outcome()
    is_another = bool(uid) and known is not None and known[0] != uid
    if outcome == "" or (outcome and not is_another):
        print_line(f"the job is over: {outcome or 'it succeeded'}")
        # Kubernetes may not have answered the pod that ended the job.
        return end_with(plan, run_dir, 1 if outcome else 0)
    waited = False
    while FileJournal(run_dir.journal).is_held():
        if not waited:
            print_line("another pod still coordinates: waiting")
        waited = True
        time.sleep(LOOK_S)
    if is_another:
        asyncio.run(release_all(manager_of(plan, run_dir)))
        run_dir.reopen(ended=True)
    if uid and (is_another or not known):
        # Each pod of a resuming Job writes this, because the first may end before it has begun.
        known = (uid, is_another)
        write_json(run_dir.path / UID_FILE, {"uid": uid, "resumes": is_another})
    host, port = parse_address(plan.settings["address"])
    with listen(os.environ[ADDRESS_VARIABLE], port) as listener:
        code = coordinate(run_dir, plan, listener, host, resume=known is not None and known[1])
    return code if run_dir.outcome() is None else end_with(plan, run_dir, code)


def end_with(plan: FleetPlan, run_dir: RunDir, code: int) -> int:
    """Make the Job end with this pod. Returns its exit status."""
    asyncio.run(finish_job(plan.settings["namespace"], job_prefix(run_dir.spec().job), code))
    return code


def check_volume(path: Path) -> None:
    """Raise UserError if this pod's user may not write in a run directory, or make it."""
    there = next(each for each in (path, *path.parents) if os.path.exists(each))
    if not os.access(there, os.W_OK | os.X_OK):
        user = os.geteuid()
        raise UserError(
            f"user {user} of this pod may not write to the volume at {path.parent}: give the pods "
            f"a template with securityContext: {{fsGroup: {os.getegid()}}}, by --coordinator-pod, "
            f"or let user {user} write there, where the volume's driver ignores fsGroup"
        )


def read_uid(run_dir: RunDir) -> tuple[str, bool] | None:
    """Return the uid of the last Job that ran the job, and whether it resumed it; None: none ran.

    UserError.
    """
    path = run_dir.path / UID_FILE
    if not path.exists():
        return None
    try:
        found = json.loads(read_regular(path, DOCUMENT_BYTES_MAX))
        return str(found["uid"]), bool(found["resumes"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged: {error}; remove it to go on") from None


async def finish_job(namespace: str, prefix: str, code: int) -> None:
    """Make the Job end with this pod: another pod could not help."""
    from httpx2 import HTTPError
    from lightkube import ApiError, AsyncClient, ConfigError
    from lightkube.resources.batch_v1 import Job
    from lightkube.resources.core_v1 import Pod
    from lightkube.types import PatchType

    try:
        client = AsyncClient(namespace=namespace)
        if code:
            limit = {"spec": {"backoffLimit": 0}}
            await client.patch(Job, instance_of(prefix), limit, patch_type=PatchType.MERGE)
        if pod := os.environ.get(POD_VARIABLE):
            about = (await client.get(Pod, pod)).metadata
            # The controller has removed it (see kubernetes_manager.py), but this pod's end counts.
            if about is not None and UNCOUNTED in (about.annotations or {}):
                counted = {"metadata": {"finalizers": [*(about.finalizers or ()), TRACKING]}}
                await client.patch(Pod, pod, counted, patch_type=PatchType.MERGE)
        await client.close()
    except (ApiError, ConfigError, HTTPError) as error:
        print_line(f"Kubernetes will try again ({first_line(error)})")


def prepare(run_dir: RunDir) -> FleetPlan:
    """Make the run directory, unless an earlier pod has; return the job's plan. UserError."""
    secret = load_secret(os.environ)
    check_volume(run_dir.path)
    try:
        spec = decode_job(os.environ.pop(JOB_VARIABLE).encode())
        plan = FleetPlan(**json.loads(os.environ.pop(PLAN_VARIABLE)))
    except (Damaged, KeyError, TypeError, ValueError) as error:
        raise UserError(f"this is no pod of a job's coordinator: {error}") from None
    run_dir.attach(spec, secret)
    with contextlib.suppress(OSError):  # then what an earlier pod has written counts
        write_run_dir(run_dir.path, secret)  # mounting a volume may have opened the old file
    plan.write()
    return plan


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
