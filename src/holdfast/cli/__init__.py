"""Runs the `holdfast` command."""
