"""Puts a worker's pieces of states and gradients into its node's memory, and recalls them."""
