"""Has what the machines of the core share: events, effects, standing, votes, policies."""
