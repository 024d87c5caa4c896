"""Drives the core's machines on real computers, with sockets, processes, files and clocks."""
