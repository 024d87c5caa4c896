"""`holdfast coordinator` adds a coordinator to a job, to take over when the leader fails."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from holdfast.engine.commands.shared_options import add_secret, add_tls
from holdfast.engine.core.errors import UserError
from holdfast.engine.net.secret import load_secret
from holdfast.engine.net.tcp import listen
from holdfast.engine.net.tls import server_of
from holdfast.engine.runtime.launcher import CoordinatorSite, launch_standby
from holdfast.engine.runtime.leadership.election import FORM, open_election
from holdfast.engine.runtime.rundir import RunDir


def main(argv: list[str]) -> int:
    options = parser().parse_args(argv)
    open_election(options.election)
    run_dir = RunDir(options.run_dir)
    try:
        run_dir.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--run-dir {run_dir.path}: {error.strerror}; name another") from None
    load_secret(dict(os.environ), file=options.secret_file, run_dir=run_dir.path)
    server_of(options.tls)  # raises UserError if the files are bad
    arguments = ["--election", options.election]
    if options.secret_file is not None:
        arguments += ["--secret-file", str(options.secret_file)]
    with listen(options.host, options.port) as listener:
        site = CoordinatorSite(
            run_dir=run_dir, listener=listener, host=options.host, tls=options.tls
        )
        return launch_standby(site, arguments)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="holdfast coordinator",
        description="Run a standby coordinator of a job: if the leader fails, a standby takes over "
        "and the job goes on. It ends with the job; if it leads and is told to end before that, "
        "a standby takes over.",
    )
    found.add_argument("--election", required=True, metavar="URL", help=FORM)
    found.add_argument(
        "--run-dir", type=Path, required=True, help="directory for this coordinator's event log"
    )
    found.add_argument(
        "--host", required=True, help="this machine's name or address, as agents reach it"
    )
    found.add_argument("--port", type=int, default=0, help="default: any that is free")
    add_secret(found, "HOLDFAST_SECRET, or RUN_DIR/secret")
    add_tls(found)
    return found
