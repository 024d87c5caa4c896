"""Whether this machine is fit: checks, verdicts, history."""
