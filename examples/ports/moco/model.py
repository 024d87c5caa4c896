"""What the scripts of this folder share with examples/moco.py, which is the port to Holdfast."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from moco import Encoder, Queue, digest, images_of, parse_options, view

__all__ = ["Encoder", "Queue", "digest", "images_of", "parse_options", "view"]
