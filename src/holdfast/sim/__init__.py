"""Deterministic simulation: the real machines, a simulated world, faults and clocks from one seed.

Nothing here decides anything of the protocol, and nothing here knows tensors, sockets or threads.
"""
