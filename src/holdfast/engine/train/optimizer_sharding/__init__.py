"""Shares out the optimizers' state among the members of a view."""
