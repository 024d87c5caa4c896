"""Defines options that several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_secret(parser: argparse.ArgumentParser, otherwise: str) -> None:
    """Add the option --secret-file; `otherwise` says where the secret comes from without it."""
    parser.add_argument(
        "--secret-file",
        type=Path,
        help=f"file with the job's secret, readable only by you (default: {otherwise})",
    )


def add_tls(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tls",
        type=Path,
        metavar="DIR",
        help="encrypt the control plane; DIR holds this machine's certificate tls.crt with its "
        "key tls.key, and ca.crt, the CA that signed all of the job's certificates",
    )
