"""`holdfast dashboard RUN` shows a run in a browser, while it works and after its end."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from holdfast.engine.commands.shared_options import add_listening, add_secret, add_tls
from holdfast.engine.core.errors import UserError
from holdfast.engine.host.lifetime import ORDERS, die_with_parent, leave_ending_signals
from holdfast.engine.net.secret import VARIABLE, load_secret
from holdfast.engine.net.standard_streams import print_plain
from holdfast.engine.net.tls import client_of
from holdfast.engine.runtime.contact import contact_by, parse_address
from holdfast.engine.runtime.leadership.election import SCHEMES
from holdfast.engine.runtime.run_mirror import RunMirror
from holdfast.engine.runtime.rundir import RunDir
from holdfast.engine.runtime.supervise import Kept
from holdfast.engine.runtime.temporary import temporary_folder

NEEDS = ("starlette", "uvicorn")


def main(argv: Sequence[str]) -> int:
    """Serve until Ctrl-C; `argv` follows `holdfast dashboard`."""
    options = parser().parse_args(argv)
    if options.parent is not None:
        die_with_parent(options.parent)
        leave_ending_signals()
        signal.signal(ORDERS[signal.SIGTERM], lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    check_packages()
    from holdfast.engine.net.web_server import is_loopback

    if not is_loopback(options.host):
        text = "without encryption: whoever can read this network can read the token"
        print_plain(f"holdfast: the dashboard listens on {options.host} {text}", file=sys.stderr)

    def tell(url: str) -> None:
        if options.parent is None:
            print_plain(f"dashboard: {url}", flush=True)
        else:  # standard output belongs to the job's script
            print_plain(f"holdfast: dashboard: {url}", file=sys.stderr, flush=True)

    if is_address(options.run):
        with temporary_folder("dashboard-") as folder:
            _serve_from_afar(options, folder, tell)
    else:
        run_dir = RunDir(Path(options.run))
        run_dir.spec()  # refuses a directory without a run
        _serve(options, run_dir, tell)
    return 0


def is_address(run: str) -> bool:
    """Return whether a job's address is meant, and not a directory that is there."""
    if run.startswith(SCHEMES):
        return True
    with contextlib.suppress(ValueError):
        return bool(parse_address(run)) and not Path(run).exists()
    return False


def _serve_from_afar(
    options: argparse.Namespace, folder: Path, tell: Callable[[str], None]
) -> None:
    """Serve what the coordinator sends of its run directory."""
    contact = contact_by(options.run, client_of(options.tls))
    secret = load_secret(os.environ, file=options.secret_file)
    mirror = RunMirror(contact, secret, folder / options.run.replace("/", "_"))
    mirror.update()
    _serve(options, mirror.run_dir, tell, mirror.update)


def _serve(
    options: argparse.Namespace,
    run_dir: RunDir,
    tell: Callable[[str], None],
    update: Callable[[], None] | None = None,
) -> None:
    from holdfast.engine.net.web_server import listen, serve
    from holdfast.reports.dashboard.site import Site, make_dashboard

    site = Site(run_dir, client_of(options.tls), update=update)
    listener = listen(options.host, options.port)
    server, url = make_dashboard(site, listener, options.host)
    serve(listener, server, lambda: tell(url))


def check_packages() -> None:
    """Raise UserError if the packages of the dashboard are not installed."""
    if missing := [name for name in NEEDS if importlib.util.find_spec(name) is None]:
        raise UserError(
            f"the dashboard needs {' and '.join(missing)}: pip install 'holdfast[dashboard]'"
        )


def listen(run_dir: RunDir, tls: Path | None) -> Kept:
    """Return a dashboard as a process to be kept beside a run. UserError."""
    check_packages()

    def command(_: int) -> list[str]:
        return [
            *(sys.executable, "-m", "holdfast.cli.main", "dashboard", str(run_dir.path)),
            *("--parent", str(os.getpid())),
            *(("--tls", str(tls)) if tls is not None else ()),
        ]

    return Kept("dashboard", command, serves=True)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="holdfast dashboard",
        description="Show a run in a browser: workers, loss, where the time goes, incidents and "
        "their cost, and buttons to drain nodes and to move workers. It reads the run's files, "
        "also after a crash, and asks the coordinator while that answers. Ctrl-C ends it.",
    )
    found.add_argument(
        "run",
        metavar="RUN",
        help="directory of the run; or, where it is not at hand, HOST:PORT of the job's "
        "coordinator, or the URL of its --election",
    )
    add_secret(found, f"${VARIABLE}; only for an address, as a directory has its own")
    add_listening(found)
    add_tls(found)
    found.add_argument("--parent", type=int, help=argparse.SUPPRESS)  # ends with this process
    return found
