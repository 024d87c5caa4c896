"""Contains the examples of an installed Holdfast: a small GPT, and the demo."""
