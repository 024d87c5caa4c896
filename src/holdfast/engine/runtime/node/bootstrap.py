"""Runs the user's script as __main__: the first code of every worker process.

    python -m holdfast.engine.runtime.node.bootstrap SCRIPT ARGS...

It ties the process to its agent, and writes to the failure pipe how the script has ended: DONE for
a script that ran to its end, one sentence for a UserError, else the script's traceback, with a last
line that names an error of the machine's own. A process that ends without writing there counts as
lost, with any exit status.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import pkgutil
import runpy
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from holdfast.engine.core.errors import HoldfastError, UserError
from holdfast.engine.core.machine_errors import MachineError, Raised, judge_error
from holdfast.engine.host.host import advise_on_shared_memory
from holdfast.engine.host.lifetime import adopt_orphans, die_with_parent, leave_ending_signals
from holdfast.engine.runtime import user_script
from holdfast.engine.runtime.node.shard_processes import (
    BY_MACHINE,
    DONE,
    FOR_USER,
    make_shards,
    report_failure,
)

MODULE = "holdfast.engine.runtime.node.bootstrap"
CHAIN_MAX = 16  # limit for the exceptions between an error and its first cause
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # read by PyTorch as it allocates for the first time
HYDRA_RAISES = "HYDRA_FULL_ERROR"  # else Hydra prints an error itself, and ends with status 1
PACKAGE = os.path.join(Path(__file__).parents[3], "")
SCRIPTS = (os.path.join(PACKAGE, "engine/faults", ""), os.path.join(PACKAGE, "lab/check", ""))
DISTURBED = os.path.join(SCRIPTS[0], "disturbed.py")  # runs the script, too
LOADERS = {__file__, user_script.__file__, runpy.__file__, pkgutil.__file__, DISTURBED}


def main(argv: list[str]) -> int:
    """Returns the exit code: 0, the script's own, or 1 after an exception."""
    failure_fd, together = attach(), None
    os.environ.setdefault(HYDRA_RAISES, "1")
    user_script.become(argv)
    if int(os.environ.get("HOLDFAST_PROCS", "1")) > 1:
        together = make_shards(failure_fd)
    report = make_reporter(failure_fd) if together is None else together.report
    code = run_and_report(lambda: _run(argv[0]), report)
    if together is not None:
        if code == 0:
            finish()
        together.end(code)
    elif code == 0:
        os.write(failure_fd, DONE)
    return code


def attach() -> int:
    """Tie this process to its agent; return the descriptor to which a failure is written."""
    die_with_parent(int(os.environ["HOLDFAST_PARENT"]))
    leave_ending_signals()
    adopt_orphans()  # its agent then finds every process below it
    faulthandler.enable()  # a script that dies by a signal leaves its stack in the log
    failure_fd = int(os.environ.pop("HOLDFAST_FAILURE_FD"))
    os.set_inheritable(failure_fd, False)
    os.set_inheritable(int(os.environ["HOLDFAST_FD"]), False)
    return failure_fd


def make_reporter(failure_fd: int) -> Callable[[str], None]:
    """Return the function that reports a failure to the agent by this descriptor."""
    return lambda text: report_failure(failure_fd, text.encode(errors="replace"))


def run_and_report(run: Callable[[], None], report: Callable[[str], None]) -> int:
    """Run a script; report its failure by `report`, and return the exit code."""
    try:
        run()
    except SystemExit as end:
        if end.code is None or end.code == 0:
            return 0
        if isinstance(end.code, int):
            report(f"the script ended with exit code {end.code}")
            return end.code
        report(str(end.code))
        return 1
    except BaseException as error:  # noqa: BLE001 - told to the agent
        text, by_machine = describe(error), find_machine_error(error)
        if by_machine is MachineError.SHARED_MEMORY:
            text = f"{text}\n{advise_on_shared_memory()}"
        report(text + (f"{BY_MACHINE}{by_machine.value}" if by_machine else ""))
        return 1
    return 0


def _run(script: str) -> None:
    """Run the script; if it ends well, end the job that it has left open.

    Its draws from the global generators before it joins the job are keyed as well: for
    example a split of the data.
    """
    # What only starts workers does without torch.
    from holdfast.engine.train.data.random_streams import seed_generators

    seed_generators(int(os.environ.get("PYTHONHASHSEED") or 0))
    try:
        user_script.run(script)
    except SystemExit as end:
        if end.code:
            raise
    training = sys.modules.get(
        "holdfast.engine.train.job"
    )  # not imported by a script that does not train
    if training is not None:
        training.end_script()


def environment_of_job(threads: int, seed: int) -> dict[str, str]:
    """Return the variables that are the same on all machines.

    Results depend on them: sums inside kernels on the number of CPU threads, and the order of a
    set of strings on the seed of Python's hashes.
    """
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "PYTHONHASHSEED": str(seed % 2**32),
    }


def environment_for_memory(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for PyTorch's host memory, as the user has set them if so.

    In huge pages a tensor that is touched for the first time costs one page fault for 2 MiB
    instead of 512, and is freed in a tenth of the time.
    """
    return {HUGE_PAGES: environ.get(HUGE_PAGES, "1")}


def describe(error: BaseException) -> str:
    """Return one sentence for what the user can mend, else the traceback of the script's frames.

    The sentence ends with the line of the script that was running.
    """
    if isinstance(error, UserError):
        return f"{FOR_USER}{error}{_line_of_script(error)}"
    if isinstance(error, HoldfastError):
        return str(error)
    story = traceback.TracebackException.from_exception(error)
    each: traceback.TracebackException | None = story
    while each is not None:
        each.stack = _script_frames(each.stack)
        each = each.__cause__ or each.__context__
    return "".join(story.format()).strip()


def find_machine_error(error: BaseException) -> MachineError | None:
    """Return the machine's own error behind an exception; None: the script is at fault."""
    chain: list[Raised] = []
    each: BaseException | None = error
    while each is not None and len(chain) < CHAIN_MAX:
        classes = tuple(base.__name__ for base in type(each).__mro__)
        number = each.errno if isinstance(each, OSError) else None
        chain.append(Raised(classes=classes, text=str(each), number=number))
        each = each.__cause__ or each.__context__
    return judge_error(chain).error


def _script_frames(stack: traceback.StackSummary) -> traceback.StackSummary:
    """Keep the script's frames and those of the libraries it uses.

    What loads the script is left out, and so are our own frames, unless the error arose there.
    """
    frames = [f for f in stack if f.filename not in LOADERS and not f.filename.startswith("<fro")]
    theirs = [i for i, frame in enumerate(frames) if not _is_ours(frame.filename)]
    last = theirs[-1] if theirs else -1
    kept = [f for i, f in enumerate(frames) if i >= last or not _is_ours(f.filename)]
    return traceback.StackSummary.from_list(kept)


def _line_of_script(error: BaseException) -> str:
    """Return the innermost line of the user's own files, in brackets; empty if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if f.filename not in LOADERS and _is_users(f.filename)]
    if not theirs:
        return ""
    path = theirs[-1].filename
    inside = os.path.realpath(path).startswith(os.path.join(os.getcwd(), ""))
    name = os.path.relpath(path) if inside else os.path.basename(path)
    return f" ({name}, line {theirs[-1].lineno})"


def _is_users(filename: str) -> bool:
    """Return whether a file is neither of Holdfast, nor of Python, nor of an installed package."""
    libraries = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    path = os.path.abspath(filename)
    is_library = any(path.startswith(os.path.join(each, "")) for each in libraries)
    return not (filename.startswith("<") or is_library or _is_ours(filename))


def _is_ours(filename: str) -> bool:
    """Return whether a file is of Holdfast, and not one of the scripts that come with it."""
    return filename.startswith(PACKAGE) and not filename.startswith(SCRIPTS)


def leave(code: int) -> NoReturn:
    """Run the registered exit functions, then end without tearing native threads down."""
    finish()
    os._exit(code & 0xFF)


def finish() -> None:
    """Run the registered exit functions, and flush the standard streams."""
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
