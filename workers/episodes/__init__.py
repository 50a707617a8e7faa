"""Episodes without a queue: requests arrive on standard input, trajectories leave on standard output."""
