"""What a worker does between two step boundaries: vote, commit, audits, copies, saves. Pure."""
