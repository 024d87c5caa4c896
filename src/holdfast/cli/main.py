"""Runs the `holdfast` command: finds a command among those of all products, and imports it."""

from __future__ import annotations

import sys

from holdfast.engine.core.errors import HoldfastError
from holdfast.engine.net.standard_streams import fill_standard_streams, print_line, print_plain
from holdfast.engine.plugins import find_command, list_commands


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status; bad input is one line on standard error and status 2."""
    fill_standard_streams()
    args = sys.argv[1:] if argv is None else argv
    if not args or args[0] in ("-h", "--help", "help"):
        print_usage()
        return 0 if args else 2
    if args[0] == "--version":
        import holdfast

        print_plain(f"holdfast {holdfast.__version__}")
        return 0
    try:
        return int(find_command(args[0])(args[1:]))
    except HoldfastError as error:
        print_line(error)
        return 2
    except BrokenPipeError:
        return 1


def print_usage() -> None:
    """Print a line on each command of all products, those of other packages among them."""
    print_plain("usage: holdfast COMMAND ...\n")
    for name, command in list_commands().items():
        print_plain(f"  {name:<11} {command.text}")
    print_plain("\n`holdfast COMMAND --help` describes a command and its options.")


if __name__ == "__main__":
    sys.exit(main())
