"""Trajectories to batches: samples, advantages, packing, and the check of log-probs against the engine."""
