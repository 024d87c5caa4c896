"""`holdfast demo` runs the example that trains through faults and compares the results."""

from __future__ import annotations

from holdfast.examples.demo import main  # tidy: allow layers because the demo is an example

__all__ = ["main"]
