"""The order of one run on rank 0: enqueue, take in, train, checkpoint, publish, and report meanwhile."""
