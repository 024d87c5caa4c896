"""Bytes and messages: no sockets, nothing unpickled."""
