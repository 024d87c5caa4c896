"""Keeps what a job leaves for people and proofs: the ledger."""
