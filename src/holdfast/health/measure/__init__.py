"""Measures this machine: the processor, memory, disks, network and GPUs."""
