"""Measure this machine: the processors, memory, disks, network and GPUs."""
