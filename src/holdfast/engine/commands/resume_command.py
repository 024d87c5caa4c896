"""`holdfast resume` continues a run that ended early, from its newest checkpoint."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from holdfast.engine.commands import launch_command
from holdfast.engine.commands.run_command import choose_show
from holdfast.engine.commands.shared_options import (
    add_listeners,
    add_notices,
    add_plain,
    add_tls,
)
from holdfast.engine.core.errors import UserError
from holdfast.engine.fleet.cluster_manager import PLAN_FILE
from holdfast.engine.net.secret import VARIABLE
from holdfast.engine.net.standard_streams import print_line
from holdfast.engine.net.tcp import listen
from holdfast.engine.net.tls import peer_tls_of
from holdfast.engine.plugins import find_listener
from holdfast.engine.runtime.launcher import CoordinatorSite, launch_job
from holdfast.engine.runtime.leadership.journal import FileJournal
from holdfast.engine.runtime.rundir import RunDir
from holdfast.engine.runtime.user_script import changed_sources, is_present
from holdfast.engine.state.store.open import check_writable, open_storage


def main(argv: list[str]) -> int:
    options = parser().parse_args(argv)
    run_dir, tls = RunDir(options.run_dir.absolute()), options.tls
    spec = run_dir.spec()
    if run_dir.outcome() == "":
        raise UserError(f"the run in {run_dir.path} has succeeded: there is nothing to resume")
    if spec.nodes.election:
        raise UserError(
            "a job with --election is resumed by its coordinators: start them, and agents, again"
        )
    if FileJournal(run_dir.journal).is_held():
        raise UserError(f"the run in {run_dir.path} is running: there is nothing to resume")
    run_dir.check_journal()
    if not Path(spec.cwd).is_dir():
        raise UserError(f"the job's folder {spec.cwd} is not on this machine: put its files there")
    if not is_present(spec.cwd, spec.script):
        raise UserError(f"the job's script {spec.script} is not under {spec.cwd} any more")
    if changed := changed_sources(run_dir.path, spec.cwd, spec.script):
        text = (
            f"{', '.join(changed)} changed since the run began: steps to come follow the new text"
        )
        print_line(f"{text}; what is in the state stays")
    tls = tls.absolute() if tls is not None else None
    beside = [find_listener(name).listen(run_dir, tls) for name in options.listeners]
    os.environ.pop(VARIABLE, None)  # the run directory holds the secret
    os.chdir(spec.cwd)
    if (run_dir.path / PLAN_FILE).exists():
        if options.notices:
            text = "the nodes of this job ask where `holdfast launch --notices` says"
            raise UserError(f"--notices {options.notices}: {text}")
        return launch_command.go_on(run_dir, options.host, options.port)
    peer_tls_of(tls)  # raises UserError if the files are bad
    if spec.checkpoints.store:
        check_writable(open_storage(spec.checkpoints.store), spec.checkpoints.store)
    with listen(options.host, options.port) as listener:
        run_dir.reopen()
        print_line(f"run directory {run_dir.path}")
        site = CoordinatorSite(run_dir=run_dir, listener=listener, host=options.host, tls=tls)
        show = choose_show(plain=options.plain)
        return launch_job(
            site, spec, resume=True, show=show, beside=beside, notices=options.notices
        )


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="holdfast resume",
        description="Continue a run that was interrupted, failed, or lost its machine: same "
        "script, same arguments, from its newest checkpoint or, without one, from step 0. The "
        "result equals that of an undisturbed run. Further nodes must join again.",
    )
    found.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="directory of the run")
    found.add_argument(
        "--host", default="127.0.0.1", help="this machine's address, as for `holdfast run`"
    )
    found.add_argument(
        "--port", type=int, default=0, help="port to listen on (default: a free one)"
    )
    add_tls(found)
    add_notices(found)
    add_listeners(found)
    add_plain(found)
    return found
