"""Decides what a worker does between two step boundaries: vote, commit, audits, saves. Pure."""
