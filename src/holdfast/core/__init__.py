"""Holds the protocol as pure machines, without clock, randomness, sockets, threads or tensors."""
