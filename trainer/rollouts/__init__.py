"""What the trainer enqueues and what comes back: requests out, trajectories in, groups, and the ledger of both."""
