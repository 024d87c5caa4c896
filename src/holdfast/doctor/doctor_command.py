"""Run `holdfast doctor`, which judges whether this machine is fit to join a job."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

import holdfast
from holdfast.doctor import examination as doctor
from holdfast.engine.commands.plain_console import PlainConsole
from holdfast.engine.commands.shared_options import add_checks
from holdfast.engine.core.errors import UserError
from holdfast.engine.host.checks_peers import Report
from holdfast.engine.host.external_checks import parse_all_checks
from holdfast.engine.host.findings import GIB, KIB, MIB, Finding, Grade, to_one_line, worst
from holdfast.engine.host.history import Health, HealthVerdict, Watch
from holdfast.engine.host.light import light_checks
from holdfast.engine.host.network_speed import PeerServer
from holdfast.engine.net.secret import load_secret
from holdfast.engine.net.standard_streams import print_plain
from holdfast.engine.runtime.contact import parse_address
from holdfast.engine.state.store.regular_files import read_named

REPORT_BYTES_MAX = 4 * MIB
PREFETCH = 2  # batches that each loader of a DataLoader keeps ready, by default
WIDTH_ELSEWHERE = 120  # where the output is no terminal
STYLES = {Grade.OK: "green", Grade.WARN: "yellow", Grade.FAIL: "bold red", Grade.SKIPPED: "dim"}
UNITS = {"": 1, "K": KIB, "M": MIB, "G": GIB}


def main(argv: list[str]) -> int:
    """Run the command; returns 0 for fit, perhaps with warnings, 1 not fit, 2 wrong options."""
    options = parser().parse_args(argv)
    if options.for_s <= 0:
        raise UserError(f"--for-s {options.for_s:g} must be positive")
    if options.serve:
        return serve(options)
    if options.watch:
        return watch(options)
    wanted = make_examination(options)
    try:
        with _progress(quiet=options.json) as progress:
            report = doctor.examine(wanted, progress)
    except KeyboardInterrupt:
        print_plain("interrupted", file=sys.stderr)
        return 130
    if options.json:
        print_plain(json.dumps(doctor.to_plain(report), indent=2))
    else:
        show(report)
    return 1 if worst(report.findings) is Grade.FAIL else 0


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="holdfast doctor",
        description="Examine this machine before it joins a job: arithmetic, memory, disk, limits, "
        "GPUs, and the way to other machines. Exit status 0 if it is fit, 1 if it is not.",
    )
    found.add_argument("--quick", action="store_true", help="the light checks only, in 3 s")
    found.add_argument("--json", action="store_true", help="for scripts, and for --against")
    found.add_argument("--dir", default=".", help="where the job will write (default: here)")
    found.add_argument(
        "--against",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="another machine's --json output; may be repeated: versions must be equal, and speeds "
        "close to the median",
    )
    found.add_argument(
        "--peer",
        type=_peer,
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="measure the way to a machine where `holdfast doctor --serve` runs; may be repeated",
    )
    found.add_argument("--run-dir", type=Path, help="take the job's secret from this run")
    found.add_argument("--secret-file", type=Path, help="or from this file, in hexadecimal digits")
    found.add_argument(
        "--loaders", type=int, default=0, metavar="N", help="data loader processes on this machine"
    )
    found.add_argument(
        "--batch-bytes", type=_size, default=0, metavar="SIZE", help="of one batch, such as 40M"
    )
    add_checks(found)
    serving = found.add_argument_group("for other machines' --peer")
    serving.add_argument(
        "--serve", action="store_true", help="answer them, until Ctrl-C or for --for-s"
    )
    serving.add_argument("--host", default="0.0.0.0", help="listen there (default: everywhere)")
    serving.add_argument("--port", type=int, default=0, help="default: any free one")
    watching = found.add_argument_group("while a job runs")
    watching.add_argument(
        "--watch", action="store_true", help="repeat the light checks, until Ctrl-C or for --for-s"
    )
    watching.add_argument(
        "--every-s", type=float, default=10.0, metavar="S", help="seconds between rounds (10)"
    )
    found.add_argument(
        "--for-s",
        type=float,
        default=3600.0,
        metavar="S",
        help="end --serve and --watch after this many seconds (default 3600)",
    )
    return found


def _peer(text: str) -> tuple[str, int]:
    try:
        return parse_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _size(text: str) -> int:
    number, unit = text.rstrip("KMGkmg"), text[len(text.rstrip("KMGkmg")) :].upper()
    if not number.isdecimal() or unit not in UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: give bytes, or such as 40M")
    return int(number) * UNITS[unit]


def make_examination(options: argparse.Namespace) -> doctor.Examination:
    """Turn the options into an examination; UserError names the wrong value."""
    if options.loaders < 0:
        raise UserError(f"--loaders {options.loaders} must not be negative")
    if bool(options.loaders) != bool(options.batch_bytes):
        raise UserError("--loaders and --batch-bytes belong together: give both, or neither")
    return doctor.Examination(
        directory=os.path.abspath(options.dir),
        version=holdfast.__version__,
        pace=doctor.QUICK if options.quick else doctor.ExaminationPace(),
        peers=tuple(options.peer),
        secret=_secret(options) if options.peer else b"",
        against=tuple(_read(path) for path in options.against),
        shared_need_bytes=options.loaders * options.batch_bytes * PREFETCH,
        external=parse_all_checks(options.check, options.check_limit_s),
    )


def _secret(options: argparse.Namespace) -> bytes:
    return load_secret(os.environ, file=options.secret_file, run_dir=options.run_dir)


def _read(path: Path) -> Report:
    try:
        return doctor.read_report(read_named(path, REPORT_BYTES_MAX))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"--against {path} is not a report ({to_one_line(why)}): "
            "make one with `holdfast doctor --json`"
        ) from None


@contextlib.contextmanager
def _progress(*, quiet: bool) -> Iterator[doctor.Progress]:
    """Show a bar, if a person watches."""
    if quiet or not sys.stderr.isatty():
        yield lambda done, total, title: None
        return
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=PlainConsole(stderr=True), transient=True) as bar:
        task = bar.add_task("examining", total=None)

        def progress(done: int, total: int, title: str) -> None:
            bar.update(task, completed=done, total=total, description=f"examining: {title}")

        yield progress


def show(report: Report) -> None:
    """Print the table, what to do, and the verdict."""
    console = PlainConsole() if sys.stdout.isatty() else PlainConsole(width=WIDTH_ELSEWHERE)
    table = Table("check", "", "found", "limit", box=SIMPLE_HEAD)
    for finding in collapse(report.findings):
        style = STYLES[finding.grade]
        cells = (finding.name, finding.grade.value, finding.reason, finding.limit)
        table.add_row(*(Text(to_one_line(cell)) for cell in cells), style=style)
    console.print(table)
    for finding in report.findings:
        if finding.advice:
            told = Text(f"{finding.grade.value}: ", style=STYLES[finding.grade])
            console.print(told + Text(to_one_line(f"{finding.name}: {finding.advice}"), style=""))
    grade = worst(report.findings)
    name = to_one_line(report.host) or "this machine"
    console.print(Text(f"{name}: {to_one_line(report.verdict)}", style=STYLES[grade]))


def collapse(findings: Sequence[Finding]) -> list[Finding]:
    """Make one row of equal findings on several devices: eight healthy GPUs would be 60 rows."""
    rows: list[Finding] = []
    groups: dict[tuple[str, Grade], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.check, finding.grade), []).append(finding)
    for (check, grade), group in groups.items():
        reasons = dict.fromkeys(f.reason for f in group)
        alike = len(reasons) == 1 or all(f.subject.startswith("GPU ") for f in group)
        if grade not in (Grade.OK, Grade.SKIPPED) or len(group) < 3 or not alike:
            rows += group
            continue
        reason = group[0].reason if len(reasons) == 1 else f"such as: {group[0].reason}"
        rows.append(
            Finding(
                check=check,
                subject=f"({len(group)} of them)",
                grade=grade,
                reason=reason,
                limit=group[0].limit,
            )
        )
    return rows


def serve(options: argparse.Namespace) -> int:
    """Answer other machines' --peer."""
    secret = _secret(options)
    try:
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        listener = socket.create_server((options.host, options.port), family=family)
    except (OSError, OverflowError) as error:
        raise UserError(f"cannot listen on {options.host}:{options.port}: {error}") from None
    host, port = listener.getsockname()[:2]
    print_plain(f"holdfast: serving on {host}:{port} for {options.for_s:g} s", flush=True)
    server = PeerServer(
        secret, lambda text: print_plain(f"holdfast: {to_one_line(text)}", flush=True)
    )
    try:
        asyncio.run(server.serve(listener, options.for_s))
    except KeyboardInterrupt:
        print_plain("holdfast: stopped", flush=True)
    finally:
        listener.close()
    return 0


def watch(options: argparse.Namespace) -> int:
    """Repeat the light checks, as an agent does; returns 1 if the node is to be drained."""
    if options.every_s <= 0:
        raise UserError(f"--every-s {options.every_s:g} must be positive")
    external = parse_all_checks(options.check, options.check_limit_s)
    checks, verdicts = light_checks(os.path.abspath(options.dir), external=external), Watch()
    end = time.monotonic() + options.for_s
    try:
        while (now := time.monotonic()) < end:
            findings = checks.round(now)
            verdict = verdicts.observe(findings, now)
            bad = [f for f in findings if f.grade in (Grade.WARN, Grade.FAIL)]
            if options.json:
                told = {"health": verdict.health.value, "reason": verdict.reason}
                print_plain(json.dumps(told | {"findings": doctor.to_plain(bad)}), flush=True)
            else:
                print_plain(_round(verdict, bad), flush=True)
            time.sleep(max(0.0, min(options.every_s, end - time.monotonic())))
    except KeyboardInterrupt:
        pass
    finally:
        checks.close()
    return 1 if verdicts.verdict.health is Health.DRAIN else 0


def _round(verdict: HealthVerdict, bad: Sequence[Finding]) -> str:
    reason = f": {verdict.reason}" if verdict.reason else ""
    seen = "".join(f"\n  {f.grade.value} {f.line}" for f in bad)
    return f"{time.strftime('%H:%M:%S')} {verdict.health.value}{reason}{seen}"
