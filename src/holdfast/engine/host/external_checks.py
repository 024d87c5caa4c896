"""Runs the site's own commands as checks: exit status and first line are the verdict.

This is the one seam for DCGM, a node-problem-detector plugin or a script. It follows the
convention of the Monitoring Plugins (their Development Guidelines): exit status 0 is ok, 1 a
warning, 2 a failure, 3 unknown; the first line of output has the reason. A command that gives no
verdict is itself at fault and not the machine: it is skipped, with the reason.

A command runs for a bounded time. It has a process group of its own, which is killed when the
command has ended, when its time is over, and when this process is asked to end (SIGTERM). A process
that leaves the group on purpose (setsid) is let go.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGTERM
from typing import Any
from urllib.parse import quote

import msgspec

from holdfast.engine.core.errors import UserError
from holdfast.engine.host.bounded import Watcher, child_command, run_bounded
from holdfast.engine.host.findings import Finding, Grade, to_one_line
from holdfast.engine.net.descriptors import is_readable, wait_readable
from holdfast.engine.state.store.regular_files import create_regular, read_regular

PREFIX = "external-"  # so that no name can be the name of a check of ours
CHECKS_MAX = 32
LIMIT_S, LIMIT_S_MAX = 30.0, 3600.0
EVERY_S = 60.0  # between two runs on a node that trains
GRACE_S = 10.0  # for the process that runs the command to start and to end it
FILE_BYTES_MAX = 1 << 20
GRADES = {0: Grade.OK, 1: Grade.WARN, 2: Grade.FAIL}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalCheck:
    """An external check is a command, run without a shell, and when it is to be run."""

    name: str
    command: tuple[str, ...]
    limit_s: float = LIMIT_S
    every_s: float = EVERY_S


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandSample:
    """Describes the end of one run of a command; `failure`: the reason why there is no status."""

    status: int | None = None
    failure: str = ""
    said: str = ""  # its first line


def parse_check(text: str, limit_s: float = LIMIT_S) -> ExternalCheck:
    """Read `NAME=COMMAND`. UserError with its fault and the remedy."""
    name, equals, rest = text.partition("=")
    example = "give NAME=COMMAND, such as dcgm='/opt/checks/dcgm.sh --quick'"
    if not equals or not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?", name):
        raise UserError(
            f"--check {to_one_line(text)!r} has no name of up to 40 small letters, digits and "
            f"inner hyphens: {example}"
        )
    try:
        command = tuple(shlex.split(rest))
    except ValueError as error:
        raise UserError(f"--check {to_one_line(text)!r}: {error}; {example}") from None
    if not command or not command[0]:
        raise UserError(f"--check {to_one_line(text)!r} has no command: {example}")
    _check_limit(limit_s)
    return ExternalCheck(name=name, command=command, limit_s=limit_s)


def parse_all_checks(texts: Sequence[str], limit_s: float = LIMIT_S) -> tuple[ExternalCheck, ...]:
    """Read all of a command line's checks; UserError also when two have one name."""
    if len(texts) > CHECKS_MAX:
        raise UserError(f"--check is given {len(texts)} times: at most {CHECKS_MAX} are possible")
    _check_limit(limit_s)
    checks = {}
    for text in texts:
        check = parse_check(text, limit_s)
        if check.name in checks:
            raise UserError(f"--check {check.name}=... is given twice: give each its own name")
        checks[check.name] = check
    return tuple(checks.values())


def _check_limit(limit_s: float) -> None:
    if not 0 < limit_s <= LIMIT_S_MAX:
        raise UserError(f"--check-limit-s {limit_s:g} must be above 0, at most {LIMIT_S_MAX:g}")


def checks_file(run_dir: Path, node: str) -> Path:
    """Return the file of a node's checks; several nodes may share one run directory."""
    return run_dir / f"external-checks-{quote(node, safe='')}.json"


def save_checks(run_dir: Path, node: str, checks: Sequence[ExternalCheck]) -> None:
    """Leave a node's checks in its run directory, for its agent. UserError."""
    path = checks_file(run_dir, node)
    try:
        with open(create_regular(path), "wb") as file:
            file.write(msgspec.json.encode(checks))
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}; use --run-dir") from None


def load_checks(run_dir: Path, node: str) -> tuple[ExternalCheck, ...]:
    """Read the checks that were left for a node's agent; none when there is no file."""
    path = checks_file(run_dir, node)
    try:
        data = read_regular(path, FILE_BYTES_MAX)
        return msgspec.json.decode(data, type=tuple[ExternalCheck, ...])
    except FileNotFoundError:
        return ()
    except (OSError, msgspec.MsgspecError) as error:
        raise UserError(f"{path} cannot be read ({error}): give --check again") from None


def run(check: ExternalCheck) -> Finding:
    """Run a check once, waiting for it: for its limit and some seconds at most."""
    answer = run_bounded(child_command("external"), _request(check), check.limit_s + GRACE_S)
    return _finding(check, answer.lines[0] if answer.lines else None, answer.failure)


def judge_command(check: ExternalCheck, sample: CommandSample) -> Finding:
    """Turn the end of a command into a finding, by the convention of the Monitoring Plugins."""
    grade = GRADES.get(-1 if sample.status is None else sample.status, Grade.SKIPPED)
    said = to_one_line(sample.said.partition("|")[0] or sample.said)  # without performance data
    unknown = sample.failure or f"exit status {sample.status}"
    reason = said or "it said nothing"
    advice = "see what the site's own check asks for"
    if grade is Grade.SKIPPED:
        reason = f"{unknown}; it said: {said}" if said else unknown
        advice = f"nothing was learned: try `{shlex.join(check.command)}` by hand"
    return Finding(
        check=PREFIX + check.name,
        grade=grade,
        value=sample.status,
        unit="" if sample.status is None else "exit status",
        limit="warn on exit status 1, fail on 2",
        reason=to_one_line(reason),
        advice=to_one_line(advice),
    )


class RepeatedCheck:
    """Runs its command again and again; `round` never waits for it."""

    def __init__(self, check: ExternalCheck, watcher: Watcher) -> None:
        self.check = check
        self.watcher = watcher
        self._next_s = float("-inf")  # when it is to be run again

    def round(self, now: float) -> list[Finding]:
        """Return the findings of the last run, once, and start the next one when it is time."""
        line, failure = self.watcher.poll()
        waited_s = self.watcher.waited_s(now)
        if waited_s > self.check.limit_s + GRACE_S:
            self.watcher.close()
            failure = f"no answer for {waited_s:.0f} s"
        elif line is None and not failure and now >= self._next_s:
            failure = self.watcher.ask(now)
            self._next_s = now + self.check.every_s
        return [_finding(self.check, line, failure)] if line is not None or failure else []


def make_repeated_check(check: ExternalCheck) -> RepeatedCheck:
    """Make a check that an agent can repeat; it starts no process yet."""
    command = child_command("external", watch=True)
    return RepeatedCheck(check, Watcher(command, _request(check).strip(), SIGTERM))


def _request(check: ExternalCheck) -> bytes:
    request: dict[str, Any] = {"command": check.command, "limit_s": check.limit_s}
    return msgspec.json.encode(request) + b"\n"


def _finding(check: ExternalCheck, line: bytes | None, failure: str) -> Finding:
    sample = CommandSample(failure=failure or "it gave no answer")
    if line is not None:
        try:
            sample = msgspec.json.decode(line, type=CommandSample)
        except msgspec.MsgspecError as error:
            sample = CommandSample(failure=f"its answer is malformed: {error}")
    return judge_command(check, sample)


HEAD_BYTES = 4096  # kept of each output; the rest is read and thrown away
REAP_S = 0.5


def run_command(command: list[str], limit_s: float) -> CommandSample:
    """Run a command to its end, or kill it after `limit_s` seconds."""
    woken, wake = os.pipe()
    # It only leaves word: to leave while a process is being started would be to forget it.
    before = signal.signal(signal.SIGTERM, lambda number, frame: os.write(wake, b"x") and None)
    try:
        return _run(command, limit_s, woken)
    finally:
        signal.signal(signal.SIGTERM, before)
        asked = is_readable(woken)
        os.close(woken)
        os.close(wake)
        if asked:
            sys.exit(1)


def _run(command: list[str], limit_s: float, woken: int) -> CommandSample:
    try:
        popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return CommandSample(failure=f"cannot start {command[0]}: {reason}")
    assert popen.stdout is not None
    assert popen.stderr is not None
    with popen.stdout as out, popen.stderr as err:
        try:
            heads, ended = _read(popen.pid, (out.fileno(), err.fileno()), limit_s, woken)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(popen.pid, signal.SIGKILL)  # not yet reaped, so the number is still its
    with contextlib.suppress(subprocess.TimeoutExpired):
        popen.wait(REAP_S)
    failure = "" if ended else f"no answer in {limit_s:g} s"
    if popen.returncode is None:
        failure += ", and it cannot even be killed"
    elif ended and popen.returncode < 0:
        failure = f"killed by signal {-popen.returncode}"
    status = popen.returncode if ended and not failure else None
    return CommandSample(status=status, failure=failure, said=_first_line(heads))


def _read(pid: int, pipes: tuple[int, ...], limit_s: float, woken: int) -> tuple[list[bytes], bool]:
    """Read until the process ends; returns (the heads of its outputs, whether it has ended)."""
    heads = dict.fromkeys(pipes, b"")
    ending = os.pidfd_open(pid)
    waiting = [ending, woken, *pipes]
    end = time.monotonic() + limit_s
    try:
        while (left_s := end - time.monotonic()) > 0:
            ready = wait_readable(waiting, left_s)
            for pipe in (pipe for pipe in pipes if pipe in ready):
                data = os.read(pipe, 1 << 16)
                heads[pipe] = (heads[pipe] + data)[:HEAD_BYTES]
                if not data:
                    waiting.remove(pipe)
            # Its output was there before it ended, so it has been read.
            if ending in ready or woken in ready:
                return list(heads.values()), ending in ready
        return list(heads.values()), False
    finally:
        os.close(ending)


def _first_line(heads: list[bytes]) -> str:
    """Return the first line that is not blank, in the outputs' order."""
    lines = [line for head in heads for line in head.decode(errors="replace").splitlines()]
    return next((line.strip() for line in lines if line.strip()), "")
