"""What the scripts of this folder share with examples/word_lm.py, which is the port to Holdfast."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from word_lm import LanguageModel, digest, parse_options, read_words

__all__ = ["LanguageModel", "digest", "parse_options", "read_words"]
