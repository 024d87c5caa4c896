"""Adds this machine to a running job: `holdfast agent` and `holdfast coordinator`.

An agent makes it a further node. A coordinator stands by, to take over when the leader fails.
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
from pathlib import Path

from holdfast.engine.commands.shared_options import (
    add_checks,
    add_domains,
    add_notices,
    add_secret,
    add_tls,
)
from holdfast.engine.core.domains import read_domains
from holdfast.engine.core.errors import UserError
from holdfast.engine.core.types import AgentId, ProcessRole
from holdfast.engine.host.external_checks import parse_all_checks, save_checks
from holdfast.engine.net.secret import load_secret
from holdfast.engine.net.standard_streams import print_line
from holdfast.engine.net.tcp import listen
from holdfast.engine.net.tls import peer_tls_of, server_of
from holdfast.engine.runtime.contact import ask, contact_by
from holdfast.engine.runtime.launcher import (
    CoordinatorSite,
    Node,
    incarnation_after,
    launch_node,
    launch_standby,
)
from holdfast.engine.runtime.leadership.election import FORM, open_election
from holdfast.engine.runtime.rundir import RUNS, RunDir
from holdfast.engine.runtime.user_script import is_present
from holdfast.engine.wire.messages import JoinReply, JoinRequest


def make_agent_parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="holdfast agent",
        description="Add this machine to a running job. The script must be at the same path here "
        "as where the job was started.",
    )
    found.add_argument(
        "--join",
        required=True,
        metavar="HOST:PORT",
        help="address of the job's coordinator, or the URL of its election",
    )
    found.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="number of workers on this node (default: as on the first node)",
    )
    found.add_argument(
        "--name",
        help="name of this node; give the same one whenever it rejoins (default: a new name)",
    )
    found.add_argument(
        "--host",
        help="address at which other nodes reach this one (default: as the coordinator sees it)",
    )
    found.add_argument(
        "--patience-s",
        type=float,
        default=60.0,
        help="seconds to keep trying while no coordinator answers (default 60)",
    )
    add_secret(found, "HOLDFAST_SECRET, or the run directory's")
    add_tls(found)
    found.add_argument(
        "--run-dir",
        type=Path,
        help="directory for this node's logs and ledger; the job's own run directory if shared "
        "(default: holdfast-runs/NAME)",
    )
    found.add_argument(
        "--notice-s",
        type=float,
        default=float("inf"),
        metavar="SECONDS",
        help="this machine ends this many seconds after it has sent this command SIGTERM: the "
        "time that a cluster manager gives (default: others take over its work without a limit)",
    )
    add_notices(found)
    add_domains(found)
    add_checks(found)
    return found


def join_as_agent(argv: list[str]) -> int:
    options = make_agent_parser().parse_args(argv)
    tls = peer_tls_of(options.tls)
    contact = contact_by(options.join, tls.client if tls is not None else None)
    if options.nproc is not None and options.nproc < 1:
        raise UserError(f"--nproc {options.nproc}: at least 1 worker is needed")
    if not options.notice_s > 0:
        raise UserError(f"--notice-s {options.notice_s:g}: say how many seconds, more than 0")
    domains = read_domains(options.domain)
    checks = parse_all_checks(options.check, options.check_limit_s)
    secret = load_secret(os.environ, file=options.secret_file, run_dir=options.run_dir)
    question = JoinRequest(name=options.name or "")
    reply = ask(contact, secret, question, JoinReply, options.patience_s)
    spec = reply.spec
    name = AgentId(options.name or f"{socket.gethostname()}-{secrets.token_hex(3)}")
    if not os.path.isdir(spec.cwd) or not is_present(spec.cwd, spec.script):
        raise UserError(f"the job's script {spec.script} is not under {spec.cwd} on this machine")
    run_dir = RunDir((options.run_dir or RUNS / name).absolute())
    run_dir.attach(spec, secret)
    save_checks(run_dir.path, name, checks)
    os.chdir(spec.cwd)
    print_line(f"node {name} joins {contact}")
    return launch_node(
        Node(
            run_dir=run_dir,
            name=name,
            nproc=options.nproc or spec.roles_per_node[ProcessRole.WORKER],
            host=options.host or reply.seen_as,
            join=options.join,
            tls=options.tls.absolute() if options.tls is not None else None,
            first_incarnation=incarnation_after(reply.incarnation) if options.name else 1,
            notice_s=options.notice_s,
            notices=options.notices,
            domains=domains,
        ),
        spec,
    )


def join_as_coordinator(argv: list[str]) -> int:
    options = make_coordinator_parser().parse_args(argv)
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


def make_coordinator_parser() -> argparse.ArgumentParser:
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
