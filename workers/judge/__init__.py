"""Judges: each judge request becomes a score for each step of a finished rollout. They need no Docker."""
