"""Sockets without decisions: channels, TCP options, TLS, secrets."""
