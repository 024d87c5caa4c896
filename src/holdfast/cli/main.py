"""Runs the `holdfast` command: one small parser per sub-command, imported only when asked for."""

from __future__ import annotations

import importlib
import sys

from holdfast.core.errors import HoldfastError
from holdfast.net.standard_streams import fill_standard_streams, print_plain

COMMANDS = {
    "run": "run a training script on this machine, through failures",
    "launch": "run a training script on the nodes of a cluster manager, and replace lost ones",
    "resume": "go on with a run that was killed, stopped or failed",
    "agent": "add this machine to a running job",
    "status": "show a running job: view, step, processes",
    "events": "print the event log of a run",
    "explain": "list the incidents of a run, or tell the story and the cost of one",
    "top": "show a running job on the terminal, and keep the picture up to date",
    "report": "write a page about a run: where the time went, and what faults cost",
    "trace": "write a run as a trace for Perfetto",
    "metrics": "serve a run's metrics to Prometheus",
    "dashboard": "show a run in a browser, and drain nodes and move workers there",
    "drain": "empty a node of a running job, which goes on without it",
    "migrate": "move a worker of a running job to another node, while it trains",
    "scale": "put the tables of a running job on another number of servers",
    "coordinator": "stand by as another coordinator of a job, on any machine",
    "check": "try a training script on 1 and 2 workers, with a kill, and compare the bits",
    "demo": "train a small model through faults and prove that nothing changed",
    "ckpt": "list, verify, compare, repair and export checkpoints",
    "compare": "find the first step at which two runs of one job differ, and what differs",
    "replay": "compute steps of a run again, and compare them with its records",
    "audit": "compute a random share of a run's steps again, and compare them",
    "dump": "collect files that help to understand a run elsewhere",
    "incident": "make a coordinator's decisions again, from a recording",
    "ledger": "prove from a run's ledger that every sample was used exactly once",
    "data": "write digests of training data, and find later changes",
    "doctor": "examine this machine before it joins a job",
    "sim": "run the protocol in the deterministic simulator",
}


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status; bad input is one line on standard error and status 2."""
    fill_standard_streams()
    args = sys.argv[1:] if argv is None else argv
    if not args or args[0] in ("-h", "--help", "help"):
        print_plain("usage: holdfast COMMAND ...\n")
        for name, text in COMMANDS.items():
            print_plain(f"  {name:<11} {text}")
        print_plain("\n`holdfast COMMAND --help` describes a command and its options.")
        return 0 if args else 2
    if args[0] == "--version":
        import holdfast

        print_plain(f"holdfast {holdfast.__version__}")
        return 0
    if args[0] not in COMMANDS:
        names = ", ".join(COMMANDS)
        print_plain(
            f"holdfast: there is no command {args[0]!r}: use one of {names}", file=sys.stderr
        )
        return 2
    module = importlib.import_module(f"holdfast.cli.{args[0]}_command")
    try:
        return int(module.main(args[1:]))
    except HoldfastError as error:
        print_plain(f"holdfast: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 1


if __name__ == "__main__":
    sys.exit(main())
