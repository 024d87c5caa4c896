"""`holdfast dashboard RUN_DIR` shows a run in a browser, while it works and after its end."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from holdfast.cli.shared_options import add_tls
from holdfast.core.errors import UserError
from holdfast.health.measure.lifetime import die_with_parent
from holdfast.net.tls import client_of
from holdfast.runtime.rundir import RunDir
from holdfast.runtime.supervise import Kept

NEEDS = ("starlette", "uvicorn")


def main(argv: Sequence[str]) -> int:
    """Serve until Ctrl-C; `argv` follows `holdfast dashboard`."""
    options = parser().parse_args(argv)
    if options.parent is not None:
        die_with_parent(options.parent)
    check_packages()
    from holdfast.dashboard.access import is_loopback
    from holdfast.dashboard.web_server import serve

    run_dir = RunDir(options.run_dir)
    run_dir.spec()  # refuses a directory without a run
    if not is_loopback(options.host):
        text = "without encryption: whoever can read this network can read the token"
        print(f"holdfast: the dashboard listens on {options.host} {text}", file=sys.stderr)

    def tell(url: str) -> None:
        if options.parent is None:
            print(f"dashboard: {url}", flush=True)
        else:  # standard output belongs to the job's script
            print(f"holdfast: dashboard: {url}", file=sys.stderr, flush=True)

    serve(run_dir, client_of(options.tls), host=options.host, port=options.port, tell=tell)
    return 0


def check_packages() -> None:
    """Raise UserError if the packages of the dashboard are not installed."""
    if missing := [name for name in NEEDS if importlib.util.find_spec(name) is None]:
        raise UserError(
            f"the dashboard needs {' and '.join(missing)}: pip install 'holdfast[dashboard]'"
        )


def keep_beside(run_dir: RunDir, tls: Path | None) -> Kept:
    """Return a dashboard as a process to be kept beside a job for as long as that runs."""

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
    found.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="directory of the run")
    found.add_argument(
        "--host",
        default="127.0.0.1",
        help="listen on this address of this machine (default: 127.0.0.1, for this machine only)",
    )
    found.add_argument(
        "--port", type=_port, default=0, help="listen on this port (default: a free one)"
    )
    add_tls(found)
    found.add_argument("--parent", type=int, help=argparse.SUPPRESS)  # ends with this process
    return found


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) < 1 << 16):
        raise argparse.ArgumentTypeError(f"{text} is no port: 0 to 65535")
    return int(text)
