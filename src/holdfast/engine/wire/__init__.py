"""Turns bytes into messages and back, without sockets and without pickle."""
