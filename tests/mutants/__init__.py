"""Plants random one-line bugs in deciding code, and lists the bugs that no check notices."""
