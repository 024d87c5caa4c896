"""Measuring a machine's health; what the measurements mean is decided in core/checks_*.py."""
