"""Contains the protocol as pure machines: no clocks, chance, sockets, threads or tensors."""
