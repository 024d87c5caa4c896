"""`holdfast metrics RUN` serves a run's metrics to Prometheus, or prints them once.

It asks the coordinator and reads the run's files; it makes no decision and slows no process down.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from holdfast.engine.commands.shared_options import add_listening, add_tls
from holdfast.engine.core.errors import HoldfastError, UserError
from holdfast.engine.net.standard_streams import print_plain
from holdfast.engine.net.tls import client_of
from holdfast.engine.runtime.contact import job_status
from holdfast.engine.runtime.job_status import JobStatus
from holdfast.engine.runtime.rundir import RunDir, check_run

MISSING = (
    "metrics need the Python packages prometheus_client, starlette and uvicorn: "
    "pip install 'holdfast[metrics]'"
)


def main(argv: Sequence[str]) -> int:
    """Run the command; `argv` follows `holdfast metrics`."""
    options = parser().parse_args(argv)
    run_dir = RunDir(options.run_dir)
    check_run(run_dir)
    try:
        import prometheus_client

        from holdfast.engine.net.web_server import listen, make_server, serve
        from holdfast.reports.run_metrics import MetricsPage, RunCollector
    except ImportError:
        raise UserError(MISSING) from None
    tls = client_of(options.tls)

    def ask() -> JobStatus | None:
        try:
            return job_status(run_dir, tls)
        except HoldfastError:
            return None

    registry = prometheus_client.CollectorRegistry()
    registry.register(RunCollector(run_dir.path, ask))
    if options.once:
        print_plain(prometheus_client.generate_latest(registry).decode(), end="")
        return 0
    listener = listen(options.host, options.port)
    page = MetricsPage(lambda: prometheus_client.generate_latest(registry))
    server, address = make_server(page.application(), listener, options.host)
    serve(listener, server, lambda: print_plain(f"metrics: http://{address}/metrics", flush=True))
    return 130


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="holdfast metrics",
        description="Serve the metrics of a run to Prometheus until Ctrl-C, also after the run's "
        "end. They are made from the run's files and the coordinator's status at each scrape.",
    )
    found.add_argument("run_dir", metavar="RUN", type=Path, help="directory of the run")
    add_listening(found)
    found.add_argument("--once", action="store_true", help="print the metrics once instead")
    add_tls(found)
    return found
