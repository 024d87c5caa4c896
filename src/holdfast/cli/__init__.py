"""Implements the commands: they read, ask and print, and never decide."""
