"""The queue's command line: what it finds, how that reads, what its verbs do."""
