"""Defines options that several commands share."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from holdfast.engine.commands.plain_console import PlainConsole
from holdfast.engine.host.external_checks import LIMIT_S
from holdfast.engine.net.standard_streams import print_line
from holdfast.engine.runtime.node.notices import notice_source


class SuggestingParser(argparse.ArgumentParser):
    """Names the option that an unknown one resembles."""

    def error(self, message: str) -> NoReturn:
        """End with a message on standard error, and status 2."""
        for word in message.split():
            known = list(self._option_string_actions) if word.startswith("--") else []
            close = difflib.get_close_matches(word.partition("=")[0], known, 1)
            if close and message.startswith("unrecognized") and close[0] != word:
                message += f" (did you mean {close[0]}?)"
        super().error(message)


def add_secret(parser: argparse._ActionsContainer, otherwise: str) -> None:
    """Add --secret-file; `otherwise`: the source of the secret without it."""
    parser.add_argument(
        "--secret-file",
        type=Path,
        metavar="FILE",
        help=f"read the job's secret from a file that only you can read (default: {otherwise})",
    )


def add_tls(parser: argparse._ActionsContainer) -> None:
    """Add the option --tls, with which all connections of the job are encrypted."""
    parser.add_argument(
        "--tls",
        type=Path,
        metavar="DIR",
        help="encrypt all traffic between nodes and workers with TLS, except that of NCCL and "
        "torch.distributed; DIR holds this machine's certificate tls.crt (for a server and a "
        "client), its key tls.key, and ca.crt, the authority of all the job's certificates",
    )


def add_listening(parser: argparse._ActionsContainer) -> None:
    """Add --host and --port of a server for people and their tools."""
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="listen on this address of this machine (default: 127.0.0.1, for this machine only)",
    )
    parser.add_argument(
        "--port", type=_port, default=0, help="listen on this port (default: a free one)"
    )


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 6 and int(text) < 1 << 16):
        raise argparse.ArgumentTypeError(f"{text[:20]} is no port: 0 to 65535")
    return int(text)


def add_run_and(parser: argparse.ArgumentParser, what: str, text: str) -> None:
    """Add a job's run directory and, after it, something of the job that `text` describes."""
    parser.add_argument(
        "words", metavar=f"RUN {what}", nargs="+", help=f"the job's run directory, and {text}"
    )
    parser.add_argument("--run-dir", type=Path, metavar="RUN", help="the same, as an option")


def take_run(
    parser: argparse.ArgumentParser, words: list[str], run_dir: Path | None, what: str
) -> tuple[Path, list[str]]:
    """Return the run directory, and the words that follow it; ends with a message without them."""
    run, rest = (run_dir, words) if run_dir is not None else (Path(words[0]), words[1:])
    if not rest:
        parser.error(f"{words[0]} alone: give the run directory and then {what}")
    return run, rest


@contextmanager
def show_waiting(waiting: str, interrupted: str) -> Iterator[None]:
    """Show `waiting` on the terminal. Ctrl-C prints `interrupted`, and ends with status 130."""
    try:
        with PlainConsole(stderr=True).status(waiting):
            yield
    except KeyboardInterrupt:
        print_line(interrupted)
        raise SystemExit(130) from None


def add_plain(parser: argparse._ActionsContainer) -> None:
    """Add the option --plain, for terminals without changing lines."""
    parser.add_argument(
        "--plain",
        action="store_true",
        help="print lines only, without the status line at the bottom of a terminal",
    )


def add_listeners(parser: argparse._ActionsContainer) -> None:
    """Add the options for processes that run next to the job and read its files."""
    parser.add_argument(
        "--dashboard",
        action="append_const",
        const="dashboard",
        dest="listeners",
        default=[],
        help="show the job in a browser while it runs, at the URL that is printed "
        "(docs/dashboard.md)",
    )
    parser.add_argument(
        "--listener",
        metavar="NAME",
        action="append",
        dest="listeners",
        help="start this listener of a plugin beside the job, to read the run's files; repeat it "
        "for others",
    )


def add_notices(parser: argparse._ActionsContainer) -> None:
    """Add the option --notices, for the source of notices that this machine is taken away."""
    parser.add_argument(
        "--notices",
        type=source_name,
        default="",
        metavar="SOURCE",
        help="ask there every two seconds whether this machine is about to be taken away, and have "
        "others take over its work before: aws, gcp, azure, or the URL of your own server, which "
        'answers 204, or 200 with {"in_s": 30, "reason": "..."} (docs/clusters.md)',
    )


def add_domains(parser: argparse._ActionsContainer) -> None:
    """Add the option --domain, for what this machine shares with other ones and may fail."""
    parser.add_argument(
        "--domain",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="this machine is in that failure domain, such as rack=r7, whose machines may all be "
        "lost at once, and are near each other: fewer bytes leave it; repeat it for other kinds",
    )


def source_name(text: str) -> str:
    """Check a source of notices. UserError."""
    notice_source(text)
    return text


def add_checks(parser: argparse.ArgumentParser) -> None:
    """Add --check and --check-limit-s: commands of the site's own that judge this machine."""
    group = parser.add_argument_group("checks of your own")
    group.add_argument(
        "--check",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="also run this command: exit status 0 is ok, 1 a warning, 2 a failure, anything else "
        "unknown; its first line of output says why; may be repeated",
    )
    group.add_argument(
        "--check-limit-s",
        type=float,
        default=LIMIT_S,
        metavar="S",
        help=f"a command that takes longer is killed, and unknown (default {LIMIT_S:g})",
    )
