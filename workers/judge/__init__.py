"""Judges: one request in, a score for each step of a finished rollout out. No Docker."""
