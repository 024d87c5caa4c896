"""Simulates jobs deterministically: the real machines in a world whose faults come from one seed.

No module here makes a decision of the protocol, or knows tensors, sockets or threads.
"""
