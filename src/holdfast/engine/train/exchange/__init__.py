"""Carries tensors between the members of a view."""
