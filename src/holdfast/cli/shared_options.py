"""Options that several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_secret(parser: argparse._ActionsContainer, otherwise: str) -> None:
    """Add --secret-file; `otherwise` says where the secret comes from without it."""
    parser.add_argument(
        "--secret-file",
        type=Path,
        metavar="FILE",
        help=f"read the job's secret from a file that only you can read (default: {otherwise})",
    )


def add_tls(parser: argparse._ActionsContainer) -> None:
    """Add --tls."""
    parser.add_argument(
        "--tls",
        type=Path,
        metavar="DIR",
        help="encrypt the control plane with TLS; DIR holds this machine's certificate tls.crt "
        "with its key tls.key, and ca.crt, the authority of all the job's certificates",
    )
