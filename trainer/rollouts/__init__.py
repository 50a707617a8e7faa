"""What the trainer asks of the workers and what comes back: requests out, answers in, groups, and the accounts of both."""
