"""The order of one run on rank 0: ask, take in, train, checkpoint, publish, and report all the while."""
