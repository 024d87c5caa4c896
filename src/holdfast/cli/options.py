"""Options that several commands share, and how they are checked."""

from __future__ import annotations

import argparse
import ssl
from pathlib import Path

from holdfast.runtime.tls import client_of


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


def tls_of(options: argparse.Namespace) -> ssl.SSLContext | None:
    """What a client needs. UserError when a file is missing or not fit."""
    return client_of(options.tls)
