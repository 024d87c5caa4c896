"""The protocol as pure machines: no clock, randomness, sockets, threads or tensors."""
