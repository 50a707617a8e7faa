"""Where the time of a run went, from its records, and the one change that would help most."""
