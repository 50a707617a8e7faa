"""The queue's command line: what it looks up, its output, and its verbs."""
