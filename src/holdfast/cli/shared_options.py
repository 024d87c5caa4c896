"""Options that several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_secret(parser: argparse.ArgumentParser, otherwise: str) -> None:
    """`otherwise`: where the secret comes from without the option."""
    parser.add_argument(
        "--secret-file",
        type=Path,
        help=f"with the job's secret, readable by you only (default: {otherwise})",
    )


def add_tls(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tls",
        type=Path,
        metavar="DIR",
        help="encrypt the control plane; DIR holds this machine's certificate tls.crt with its "
        "key tls.key, and ca.crt, the authority of all the job's certificates",
    )
