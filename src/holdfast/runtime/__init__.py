"""The drivers around the machines on real computers: sockets, processes, files, clocks."""
