"""Runs a job: the command `holdfast run` starts coordinator, agent and workers here."""

from __future__ import annotations

import argparse
import dataclasses
import os
import secrets
import sys
from pathlib import Path

from holdfast.engine.commands.job_options import (
    JobConfig,
    add_settings,
    given_settings,
    read_config,
    write_config,
)
from holdfast.engine.commands.shared_options import (
    SuggestingParser,
    add_checks,
    add_domains,
    add_listeners,
    add_notices,
    add_plain,
    add_secret,
    add_tls,
)
from holdfast.engine.core.domains import read_domains
from holdfast.engine.core.errors import UserError, WorldError
from holdfast.engine.core.job_problems import (
    JOB_BYTES_MAX,
    as_flag,
    as_key,
    find_problem,
    find_unheeded,
)
from holdfast.engine.core.job_spec import JobSpec, with_settings
from holdfast.engine.core.settings import Setting
from holdfast.engine.faults import fault_script
from holdfast.engine.host.external_checks import parse_all_checks, save_checks
from holdfast.engine.net.secret import SECRET_BYTES_MIN, VARIABLE, load_secret
from holdfast.engine.net.standard_streams import print_line, print_plain
from holdfast.engine.net.tcp import listen
from holdfast.engine.net.tls import peer_tls_of
from holdfast.engine.plugins import find_listener, name_service
from holdfast.engine.runtime.launcher import (
    FIRST_NODE,
    CoordinatorSite,
    Show,
    hide_nothing,
    launch_job,
)
from holdfast.engine.runtime.leadership.election import parse_election
from holdfast.engine.runtime.rundir import RunDir, choose_run_path
from holdfast.engine.runtime.user_script import MODULE_MARK, is_present, name_of_module
from holdfast.engine.state.store.checkpoints import Checkpoints
from holdfast.engine.state.store.open import absolute_store, check_writable, open_storage
from holdfast.engine.state.store.regular_files import read_named

# It is named by its place, not imported: it loads torch.
DISTURBED = str(Path(fault_script.__file__).with_name("disturbed.py"))


# Options that scripts seldom have: after the script they are most likely misplaced.
OURS_ALONE = {"--nodes", "--nodes-min", "--nodes-max", "--nproc", "--run-dir", "--virtual"}


def parser() -> argparse.ArgumentParser:
    """Make the options of the command: the job's settings, and options of this launch only."""
    found = SuggestingParser(
        prog="holdfast run",
        usage="%(prog)s [OPTION ...] [-m] SCRIPT [ARG ...]",
        allow_abbrev=False,  # options of the script would be taken for short forms of these
        description="Run a training script on the workers of this machine, through failures. The "
        "script's own output goes to standard output; Holdfast's events go to standard error.",
    )
    found.add_argument(
        "script",
        nargs="?",
        default="",
        metavar="SCRIPT",
        help="the training script; it may be named in the configuration file instead",
    )
    found.add_argument(
        "-m",
        "--module",
        action="store_true",
        help="SCRIPT is a module, such as pkg.train, which is run as by `python -m`",
    )
    found.add_argument(
        "args", nargs=argparse.REMAINDER, metavar="ARG", help="arguments of the script"
    )
    add_settings(found)
    _add_launch(found)
    return found


def _add_launch(found: argparse.ArgumentParser) -> None:
    group = found.add_argument_group(
        "this launch", "Sets what belongs to this launch and is no part of the job."
    )
    group.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="read the job's settings from this TOML file; options on the command line win over it",
    )
    group.add_argument(
        "--write-config",
        type=Path,
        metavar="FILE",
        help="write the job's settings with comments to a new file for --config, and run nothing; "
        "-: to standard output",
    )
    group.add_argument(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="keep the run's settings, logs and ledger here (default: holdfast-runs/TIME-PID)",
    )
    group.add_argument(
        "--host",
        default="127.0.0.1",
        help="listen on this address of the machine, by which other nodes reach it "
        "(default: 127.0.0.1, this machine only)",
    )
    group.add_argument("--port", type=int, default=0, help="listen here (default: a free port)")
    add_secret(group, "HOLDFAST_SECRET, or a new one in the run directory")
    add_tls(group)
    add_notices(group)
    add_domains(group)
    add_listeners(group)
    add_plain(group)
    add_checks(found)
    group.add_argument(
        "--faults",
        type=Path,
        metavar="FILE",
        help="let the faults that this file describes happen in the workers, to see how the job "
        "copes (docs/stragglers.md)",
    )


def main(argv: list[str]) -> int:
    """Run a job to its end, or write down its settings. Returns the exit status."""
    options = parser().parse_args(argv)
    if options.write_config is not None:
        write_new(options.write_config, write_config(make_job(options)))
        return 0
    spec = make_spec(options)
    run_dir = RunDir(options.run_dir or choose_run_path())
    peer_tls_of(options.tls)  # raises UserError for a bad one
    beside = [find_listener(name).listen(run_dir, options.tls) for name in options.listeners]
    checks = parse_all_checks(options.check, options.check_limit_s)
    domains = read_domains(options.domain)
    with listen(options.host, options.port) as listener:
        run_dir.create(spec, make_secret(options))
        save_checks(run_dir.path, FIRST_NODE, checks)
        print_line(f"run directory {run_dir.path}")
        site = CoordinatorSite(
            run_dir=run_dir, listener=listener, host=options.host, tls=options.tls
        )
        return launch_job(
            site,
            spec,
            notices=options.notices,
            domains=domains,
            show=choose_show(plain=options.plain),
            beside=beside,
        )


def choose_show(*, plain: bool) -> Show:
    """Return the function that shows a job on standard error: a live line on a terminal."""
    if plain or not sys.stderr.isatty():
        return hide_nothing
    from holdfast.engine.commands.live_terminal import live_terminal  # it takes a while to import

    return live_terminal


def write_new(path: Path, text: str) -> None:
    """Write a file that does not exist yet; `-` is standard output. UserError."""
    if str(path) == "-":
        print_plain(text, end="")
        return
    if path.exists():
        raise UserError(f"--write-config {path} exists already: name another file")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--write-config {path} cannot be written: {error.strerror}") from None


def make_secret(options: argparse.Namespace) -> bytes:
    if options.secret_file is not None or VARIABLE in os.environ:
        return load_secret(os.environ, file=options.secret_file)
    return secrets.token_bytes(SECRET_BYTES_MIN)


def _check_store(store: str) -> None:
    """Raise UserError if a store cannot be used, or holds the checkpoints of another job."""
    storage = open_storage(store)
    try:
        steps = Checkpoints(storage).steps()
    except WorldError as error:
        raise UserError(f"--store {store} cannot be read: {error}") from None
    if steps:
        raise UserError(
            f"--store {store} already holds checkpoints, up to step {steps[-1]}: name an empty "
            "one, or go on with the job that saved them by `holdfast resume RUN_DIR`"
        )
    check_writable(storage, store)


def _warn_of_misplaced(options: argparse.Namespace) -> None:
    """Warn of options of Holdfast that stand after the script, so that the script gets them."""
    given = {word.partition("=")[0] for word in options.args}
    for flag in sorted(given & OURS_ALONE):
        text = f"{flag} stands after the script, which receives it: options of Holdfast go before"
        print_line(text)


def script_of(options: argparse.Namespace) -> str:
    """Return the script that options name, as a job keeps it. UserError."""
    if options.module and not options.script:
        raise UserError("-m names no module: give one, as in `holdfast run -m pkg.train`")
    return f"{MODULE_MARK}{options.script}" if options.module else options.script


def check_present(script: str) -> None:
    """Raise UserError unless the script can be run in the present folder."""
    if is_present(os.getcwd(), script):
        return
    if module := name_of_module(script):
        raise UserError(
            f"there is no module {module} in {os.getcwd()}, nor among the installed packages: "
            "check the name, and the folder from which the job starts"
        )
    raise UserError(f"there is no script {script}: check the path")


def _check_faults(path: Path) -> None:
    try:
        fault_script.parse(read_named(path).decode(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--faults {path} cannot be read: {error}") from None


def make_job(options: argparse.Namespace) -> JobSpec:
    """Make the job that options and file describe. UserError names the wrong value."""
    config = read_config(options.config) if options.config is not None else JobConfig()
    given = given_settings(options)
    spec = JobSpec(
        job=secrets.token_hex(JOB_BYTES_MAX // 2),
        cwd=os.getcwd(),
        script=script_of(options) or config.script,
        args=tuple(options.args) if options.script else config.args,
    )
    spec = with_settings(spec, {**config.settings, **given})

    def name(setting: Setting, value: object) -> str:
        """Name a setting as the one who gave the value wrote it."""
        if setting.key in config.settings and setting.key not in given:
            return f"{config.path}: {as_key(setting, value)}"
        return as_flag(setting, value)

    if problem := find_problem(spec, name):
        raise UserError(problem)
    if spec.nodes.election:
        parse_election(spec.nodes.election)
    store = spec.checkpoints.store
    if not store:
        return spec
    open_storage(store)
    return with_settings(spec, {"checkpoints.store": absolute_store(store)})


def make_spec(options: argparse.Namespace) -> JobSpec:
    """Make a job that can be launched here and now. UserError if it cannot."""
    spec = make_job(options)
    if problem := find_unheeded(spec, as_flag):
        raise UserError(problem)
    if not spec.script:
        raise UserError("there is no script to run: name one after the options, or in --config")
    _warn_of_misplaced(options)
    check_present(spec.script)
    if spec.checkpoints.store:
        _check_store(spec.checkpoints.store)
    if spec.servers.count:
        name_service(spec.servers.service)  # raises UserError if no plugin brings it
    if options.faults is None:
        return spec
    if spec.compat.enabled:
        raise UserError("--faults has no effect with --compat: leave one of them out")
    _check_faults(options.faults)
    args = (str(options.faults.absolute()), spec.script, *spec.args)
    return dataclasses.replace(spec, script=DISTURBED, args=args)
