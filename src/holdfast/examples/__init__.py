"""Holds the examples that an installed Holdfast brings along: a small GPT, and the demo."""
