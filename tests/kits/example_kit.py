"""Names the examples, each with arguments for a short run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from places import ROOT

EXAMPLES = ROOT / "examples"
ARGS = {
    "gpt.py": ["--steps", "4", "--width", "32", "--layers", "1", "--batch-size", "4"],
    "digits.py": ["--epochs", "2", "--batch-size", "64"],
    "fsdp.py": ["--steps", "4"],  # one process; tests/engine/jobs/test_sharded_workers.py has more
    "gan.py": ["--steps", "21", "--batch-size", "8"],
    "moco.py": ["--epochs", "2", "--images", "192", "--batch-size", "8", "--queue", "64"],
    "grpo.py": ["--warm-up", "2", "--steps", "5", "--group", "4", "--width", "16"],
    "ppo.py": ["--rollouts", "3", "--moves", "24"],
    "word_lm.py": ["--epochs", "2", "--words", "4000", "--width", "24", "--columns", "2"],
    "finetune_transformers.py": ["--steps", "4", "--width", "16", "--batch-size", "4"],
    "lightning_module.py": ["--epochs", "1", "--samples", "100"],
    "recommender.py": ["--steps", "12", "--batch-size", "16", "--rows", "50", "--samples", "600"],
    "stream.py": ["--steps", "12", "--batch-size", "2", "--width", "16", "--length", "16"],
}


def add_command(folder: Path) -> str:
    """Write the command `holdfast` into a folder; return a PATH that begins with it."""
    command = folder / "holdfast"
    folder.mkdir(parents=True)
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m holdfast.cli.main "$@"\n')
    command.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"
