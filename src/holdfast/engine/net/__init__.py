"""Contains sockets without decisions: channels, TCP options, TLS and secrets."""
