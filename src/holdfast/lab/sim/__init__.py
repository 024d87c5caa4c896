"""Simulates jobs deterministically: the real machines in a world whose faults come from one seed.

Nothing here decides anything of the protocol, and nothing here knows tensors, sockets or threads.
"""
