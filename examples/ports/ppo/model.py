"""What the scripts of this folder share with examples/ppo.py, which is the port to Holdfast."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ppo import PASSES, CartPole, Policy, digest, loss_of, parse_options, play

__all__ = ["PASSES", "CartPole", "Policy", "digest", "loss_of", "parse_options", "play"]
