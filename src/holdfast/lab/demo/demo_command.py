"""`holdfast demo` runs the example that trains through faults and compares the results."""

from __future__ import annotations

from holdfast.lab.demo.demo import main

__all__ = ["main"]
