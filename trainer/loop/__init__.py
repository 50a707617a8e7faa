"""The sequence of one run on rank 0: enqueue requests, receive results, train, write checkpoints, publish weights, and report."""
