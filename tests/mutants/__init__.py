"""Plants random one-line bugs in what decides, and tells which of them no check notices."""
