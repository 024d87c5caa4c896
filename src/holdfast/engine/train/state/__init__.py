"""Obtains, copies and keeps what the replica machine of a worker orders."""
