"""Stores checkpoints so that half a one is never shown and a wrong byte is never returned."""
