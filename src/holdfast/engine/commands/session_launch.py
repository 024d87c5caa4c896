"""Runs a job from a notebook or another interactive session: the function `launch`.

The job is a `holdfast run` of its own, whose output the session shows. It ends with the call that
started it: on an interrupt, and by the kernel when the session's process ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.engine.commands.session_script import write_script
from holdfast.engine.core.errors import UserError
from holdfast.engine.host import lifetime
from holdfast.engine.runtime.rundir import RunDir, choose_run_path, make_unwritable_error

SCRIPT_FILE = "session.py"  # its name in the run directory


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """Is a job that `launch` has run.

    `code`: its exit status, 0. `run_dir`: its run directory, with its events and logs.

        def train():
            print(holdfast.join().worker)

        done = holdfast.launch(train, nproc=1)
        print(done.run_dir, done.code)
    """

    run_dir: Path
    code: int


def launch(
    function: Callable[..., Any], arguments: Mapping[str, Any] | None = None, **options: Any
) -> Launched:
    """Run a job whose workers call a function of this session; returns when the job is over.

    `function` calls `holdfast.join()`. It reaches the workers as text, with the functions, classes,
    imports and plain values that it uses; `arguments` are its arguments by name, plain values as
    well. `options`: those of `holdfast run`: nproc=2, store="checkpoints", no_fork=True.
    The job's output is printed here. An interrupt ends the job, and so does the end of this
    process. Raises UserError for what cannot reach the workers, and if the job fails.

        def train(text):
            print(text, holdfast.join().worker)

        done = holdfast.launch(train, {"text": "I am worker"}, nproc=2)
    """
    run_dir = RunDir(Path(options.pop("run_dir", choose_run_path())))
    script = run_dir.path / SCRIPT_FILE
    text = write_script(function, arguments or {})
    if run_dir.job.exists():
        raise UserError(f"run_dir={str(run_dir.path)!r} already holds a run: name another folder")
    try:
        run_dir.path.mkdir(parents=True, exist_ok=True)
        script.write_text(text, encoding="utf-8")
    except OSError as error:
        raise make_unwritable_error(run_dir.path, error) from None
    command = ["run", "--run-dir", str(run_dir.path), *_flags(options), str(script)]
    code = _show([*(lifetime.__name__, str(os.getpid())), "holdfast.cli.main", *command])
    if code != 0:
        reason = run_dir.outcome() or "see the lines that it has printed"
        raise UserError(f"the job in {run_dir.path} ended with status {code}: {reason}")
    return Launched(run_dir=run_dir.path, code=code)


def _flags(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield options as the command line has them: a list repeats one, a tuple has its values."""
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        for each in value if isinstance(value, list) else [value]:
            if each is True:
                yield flag
            elif isinstance(each, tuple):
                yield from [flag, *map(str, each)]
            elif each is not None and each is not False:
                yield f"{flag}={each}"


def _show(command: list[str]) -> int:
    """Run a module of Python, print its output, and return its exit status."""
    interrupted = False
    with subprocess.Popen(
        [sys.executable, "-m", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # an interrupt of this session reaches the job once, from here
    ) as process:
        assert process.stdout is not None
        while True:
            try:
                for line in process.stdout:
                    sys.stdout.write(line)
                    sys.stdout.flush()
                code = process.wait()
                break
            except KeyboardInterrupt:
                interrupted = True
                process.send_signal(signal.SIGINT)
    if interrupted:
        raise KeyboardInterrupt
    return code
